"""The plan stage, and the plan of a recipe that was never run: facts gathered, the plan made and written.

A run plans after its data are prepared, from all of them. `eyas plan` on a recipe reads a part of the conversations,
and of the target its config and tokenizer only.
"""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.errors import StoreError
from storage.index import stored_fingerprints
from storage.inventory import take_inventory
from storage.location import locate
from tasks.trainer.config import Auto, Offline, Online, RunConfig
from tasks.trainer.data.mask import ChatRenderer
from tasks.trainer.data.prepared import PreparedData, PreparedSample, make_samples
from tasks.trainer.data.read import Conversation, Refusals, read_conversations
from tasks.trainer.draft.shape import draft_shape
from tasks.trainer.errors import InputError
from tasks.trainer.files import write_json, write_text
from tasks.trainer.plan import decide, make_plan
from tasks.trainer.plan_data import DataRows, active_parameters, data_rows, target_size
from tasks.trainer.plan_markdown import render_plan
from tasks.trainer.plan_options import Facts, Held, Plan
from tasks.trainer.plan_storage import measure_bandwidth
from tasks.trainer.plan_time import DEVICES, Device, measure_device
from tasks.trainer.run_dir import RunDir
from tasks.trainer.target_files import PACKAGE_SCHEME, resolve, unpacked
from tasks.trainer.target_text import find_eos_token_ids, load_tokenizer, pick_device, pick_dtype
from tasks.trainer.train.batches import Packs

logger = logging.getLogger(__name__)

# Conversations that `eyas plan` renders of a recipe's source.
SAMPLED = 400


def plan_run(config: RunConfig, run: RunDir) -> dict[str, Any]:
    """The plan of a prepared run: plan.json, plan.md, and under mode auto the run's hidden_states. Returns the receipt.

    Raises StoreError when the store's place cannot be used.
    """
    prepared = run.receipt("prepare")
    assert prepared is not None, "prepare comes first"
    data = PreparedData.open(run.train_data)
    packs = Packs(data.lengths, pack_tokens=config.train.pack_tokens, seed=config.train.seed).epoch(0)
    masks = (sample.loss_mask for sample in data)
    rows = data_rows(masks, packs, ttt_steps=config.train.ttt_steps, source="prepared")
    target_config, dtype = _target(config, prepared["device"])
    facts = _facts(
        config,
        rows,
        target_config,
        target_dtype=dtype,
        device=measure_device(prepared["device"], pick_dtype(config.train.dtype, prepared["device"])),
        vocabulary_size=prepared["vocabulary_size"],
        fingerprint=prepared["fingerprint"],
    )
    plan = make_plan(config, facts)
    write_json(run.plan_json, plan.document())
    write_text(run.plan_markdown, render_plan(plan, target=config.target.model))
    logger.info("plan: %s", plan.recommendation)
    option = plan.option(plan.chosen)
    for problem in option.problems:
        logger.warning("%s %s", plan.chosen, problem)
    if isinstance(config.hidden_states, Auto):
        run.decide(config, decide(config, plan))
        logger.info("hidden_states.mode=auto: this run is %s from here on", plan.chosen)
    return {
        "recommended": plan.recommended,
        "recommendation": plan.recommendation,
        "chosen": plan.chosen,
        "asked": config.hidden_states.mode,
        "peak_bytes": option.memory.peak,
        "stored_bytes": option.stored_bytes,
        "stored_bytes_per_token": option.stored_bytes / max(1, rows.tokens),
        "step_seconds": option.step_seconds,
        "wait_seconds": option.wait_seconds,
        "capture_seconds": option.capture_seconds,
        "device": facts.device.name,
    }


def plan_recipe(config: RunConfig, *, device: str | None = None) -> Plan:
    """The plan of a recipe, before anything is run. device: one of the table (plan_time.DEVICES); None: the one found.

    Raises InputError for an unknown device, and for what is wrong with target or data; StoreError as plan_run.
    """
    if device is not None and device not in DEVICES:
        raise InputError(f"--device {device}: known are {', '.join(DEVICES)}; leave it out for the device found")
    kind = pick_device(config.train.device) if device is None else DEVICES[device].kind
    found: Device = DEVICES[device] if device else measure_device(kind, pick_dtype(config.train.dtype, kind))
    target_config, dtype = _target(config, kind)
    return make_plan(
        config,
        _facts(
            config,
            _read_part(config, kind),
            target_config,
            target_dtype=dtype,
            device=found,
            vocabulary_size=config.draft.vocab_size,
            fingerprint=None,
        ),
    )


def _facts(
    config: RunConfig,
    rows: DataRows,
    target_config: Any,
    *,
    target_dtype: torch.dtype,
    device: Device,
    vocabulary_size: int | None,
    fingerprint: str | None,
) -> Facts:
    vocab_size = int(target_config.vocab_size)
    shape = draft_shape(
        target_config,
        config.draft,
        vocab_size=min(vocabulary_size or vocab_size, vocab_size),
        target_vocab_size=vocab_size,
        aux_layer_ids=(0, 1, 2),
    )
    states = config.hidden_states
    url = states.store_url or Offline().store_url
    return Facts(
        data=rows,
        shape=shape,
        target_config=target_config,
        target=target_size(target_config, itemsize=target_dtype.itemsize),
        target_active=active_parameters(target_config),
        device=device,
        place=measure_bandwidth(url),
        store_url=url,
        held=None if fingerprint is None or isinstance(states, Online) else _held(url, fingerprint),
    )


def _held(url: str, fingerprint: str) -> Held | None:
    """What the store has of this target. A store that cannot be read is as none: capture will say what is wrong."""
    try:
        if fingerprint not in stored_fingerprints(locate(url)):
            return None
        held = take_inventory(url, fingerprint)
    except (StoreError, OSError) as error:
        logger.warning("store %s: %s", url, error)
        return None
    per_token = held.total_bytes / held.num_tokens if held.num_tokens else 0.0
    return Held(held.spec.encoding, held.num_tokens, per_token)


def _target(config: RunConfig, device: str) -> tuple[Any, torch.dtype]:
    """The target's text config and the type of its weights; of a hub id nothing else is fetched."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(_folder(config, device), **_revision(config)).get_text_config()
    return text, pick_dtype(config.target.dtype, device, checkpoint_dtype=text.dtype)


def _folder(config: RunConfig, device: str) -> str | Path:
    """Where the target's config and tokenizer are: a folder here, or the hub's id."""
    model = config.target.model
    if _is_hub_id(model):
        return model
    files = resolve(model)
    return unpacked(files, str(pick_dtype(config.target.dtype, device)).removeprefix("torch."))


def _is_hub_id(model: str) -> bool:
    path = Path(model).expanduser()
    looks_local = model.startswith((PACKAGE_SCHEME, "/", ".", "~")) or model.endswith(".gguf") or model.count("/") > 1
    return not path.exists() and not looks_local


def _revision(config: RunConfig) -> dict[str, Any]:
    return {"revision": config.target.revision} if _is_hub_id(config.target.model) else {}


def _read_part(config: RunConfig, device: str) -> DataRows:
    """The rows of some conversations, evenly from the whole source, for the whole."""
    from transformers import AutoTokenizer

    settings, folder = config.data, _folder(config, device)
    conversations, _ = read_conversations(
        settings.sources, on_error=settings.on_error, on_truncated=settings.on_truncated
    )
    every = max(1, len(conversations) // SAMPLED)
    part = conversations[::every]
    if isinstance(folder, Path):
        tokenizer = load_tokenizer(resolve(config.target.model), folder, chat_template=config.target.chat_template)
        eos = find_eos_token_ids(folder, tokenizer)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder, **_revision(config))
        eos = (tokenizer.eos_token_id,)
        if config.target.chat_template is not None:
            tokenizer.chat_template = Path(config.target.chat_template).read_text(encoding="utf-8")
    if settings.regenerate:
        samples = [_answered(conversation, tokenizer, config) for conversation in part if conversation.messages]
    else:
        renderer = ChatRenderer(tokenizer, eos, template_arguments={"date_string": settings.date_string})
        samples = list(
            make_samples(
                part,
                renderer,
                max_tokens=settings.max_tokens,
                on_long=settings.on_long,
                pack_tokens=config.train.pack_tokens,
                long_documents=settings.long_documents,
                supervise=settings.supervise,
                refusals=Refusals(),
            )
        )
    if not samples:
        raise InputError(f"data.source={settings.source!r}: none of {len(part)} conversations leaves a sample")
    packs = Packs([len(sample.token_ids) for sample in samples], pack_tokens=config.train.pack_tokens, seed=0).epoch(0)
    told = f", answers taken as data.max_new_tokens={settings.max_new_tokens} long" if settings.regenerate else ""
    return data_rows(
        (sample.loss_mask for sample in samples),
        packs,
        ttt_steps=config.train.ttt_steps,
        source=f"estimated from {len(part):,} of {len(conversations):,} conversations{told}",
        share=len(part) / len(conversations),
    )


def _answered(conversation: Conversation, tokenizer: Any, config: RunConfig) -> PreparedSample:
    """The sample that regeneration will make at most: the prompt up to the first answer, and a longest answer."""
    messages = itertools.takewhile(lambda message: message.role != "assistant", conversation.messages)
    prompt = tokenizer.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        date_string=config.data.date_string,
    )["input_ids"]
    mask = np.array([False] * len(prompt) + [True] * config.data.max_new_tokens)[: config.data.max_tokens]
    return PreparedSample("", np.zeros(len(mask), dtype=np.int32), mask)
