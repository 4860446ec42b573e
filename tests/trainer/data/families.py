"""Chat templates of six families, written for the tests in the families' formats, and a small tokenizer for each."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "user assistant system model tool What does an eagle eat? Fish, hares and snakes. How far can it see? And at "
    "night? Less. It hunts by day. Answer in a few words. The end of the day, the end of the answer.\n\n",
    '<think>\nTwo and two make four.\n</think>\n\n4 {"name": "get_weather", "arguments": {"town": "Bergen"}}\n',
] * 8


@dataclass(frozen=True, slots=True)
class Family:
    """How one family of models writes a conversation."""

    template: str
    special: tuple[str, ...]
    """Its special tokens; the first begins a text, the last ends a turn."""


_CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FAMILIES = {
    "chatml": Family(_CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "llama3": Family(
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    # The answers' role is called model, and a system message goes into the first question.
    "gemma": Family(
        "{{ bos_token }}{% set ns = namespace(first='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.first = (m.content | trim) + '\n\n' %}{% else %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + ns.first + (m.content | trim)"
        " + '<end_of_turn>\n' }}{% set ns.first = '' %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    ),
    # No generation prompt, and the answer's space belongs to the answer.
    "mistral": Family(
        "{{ bos_token }}{% set ns = namespace(first='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.first = m.content + '\n\n' %}{% elif m.role == 'user' %}"
        "{{ '[INST] ' + ns.first + m.content + ' [/INST]' }}{% set ns.first = '' %}{% else %}"
        "{{ ' ' + (m.content | trim) + eos_token }}{% endif %}{% endfor %}",
        ("<s>", "[INST]", "[/INST]", "</s>"),
    ),
    # Shows the thoughts of answers after the last question only.
    "reasoning": Family(
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}{% set said = m.content %}"
        "{% if not thought and '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1] %}"
        "{% set said = said.split('</think>')[-1] %}{% endif %}"
        "{% if loop.index0 > ns.last and thought %}{{ '<think>\n' + (thought | trim) + '\n</think>\n\n' }}{% endif %}"
        "{{ said | trim }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|endoftext|>", "<|im_start|>", "<think>", "</think>", "<|im_end|>"),
    ),
    # Refuses a system message, and closes a turn with the end of the text.
    "no_system": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('no system role: ' + m.content) }}{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}"
        "{% else %}{{ '<|Assistant|>' + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}",
        ("<|begin|>", "<|User|>", "<|Assistant|>", "<|end|>"),
    ),
}


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 420 tokens with the family's special tokens and template."""
    family = FAMILIES[name]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(family.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.special[0],
        eos_token=family.special[-1],
        pad_token=family.special[-1],
        chat_template=family.template,
    )
