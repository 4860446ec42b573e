"""A tiny real target on disk (model, tokenizer, chat template) and conversations for it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# Before transformers, which imports triton: triton decides at its import whether its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Prefect makes the last folder of PREFECT_HOME at its import, not that folder's parents. `make test` names one in
# runs/, which a fresh clone lacks.
if "PREFECT_HOME" in os.environ:
    Path(os.environ["PREFECT_HOME"]).expanduser().mkdir(parents=True, exist_ok=True)

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.storage.s3_fixtures import fault_proxy, s3, s3_server  # noqa: F401 - fixtures

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = """the young eagle sees a river and flies over green hills to find its nest before night comes
while old birds rest""".split()  # noqa: SIM905


def write_target(
    folder: Path, *, num_layers: int = 8, template: str | None = CHATML, tied: bool = False, seed: int = 0
) -> Path:
    """A random LLaMA of hidden size 32 over 300 tokens, saved as transformers saves models."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=template
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target, made once."""
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A real Prefect server with a database of its own; starting it takes 6 to 11 s, so it is started once."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


def write_conversations(path: Path, num: int, *, seed: int = 0) -> Path:
    """num conversations of random words, 4 to 60 tokens an answer."""
    generator = torch.Generator().manual_seed(seed)

    def text(low: int, high: int) -> str:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (count,), generator=generator))

    with path.open("w") as file:
        for number in range(num):
            messages = [
                {"role": "user", "content": f"{number} {text(2, 8)}"},
                {"role": "assistant", "content": text(4, 30)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture
def recipe_values(target_folder: Path, tmp_path: Path) -> Callable[..., dict[str, object]]:
    """The values of a small complete run; keyword arguments replace keys of a group."""

    def make(run: str = "run", **groups: dict[str, object]) -> dict[str, object]:
        source = tmp_path / "source.jsonl"
        if not source.exists():
            write_conversations(source, 24)
        values: dict[str, dict[str, object]] = {
            "target": {"model": str(target_folder), "dtype": "bfloat16"},
            "data": {"source": str(source), "heldout_fraction": 0.25, "max_tokens": 96},
            "hidden_states": {"mode": "online"},
            "draft": {"vocab_size": 200},
            "train": {
                "steps": 8, "ttt_steps": 3, "pack_tokens": 128, "learning_rate": 3e-3, "warmup_steps": 2,
                "checkpoint_every": 3, "device": "cpu", "dtype": "float32",
            },
            "evaluate": {"num_prompts": 3, "max_new_tokens": 12, "draft_tokens": 3, "bootstrap_samples": 100,
                         "dtype": "float32"},
        }  # fmt: skip
        for group, changes in groups.items():
            values[group] = {**values[group], **changes}
        return {**values, "run_dir": str(tmp_path / run)}

    return make
