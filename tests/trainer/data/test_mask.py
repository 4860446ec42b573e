"""The loss mask, by template family: exactly the answers and their end-of-turn tokens are supervised."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from tasks.trainer.data.mask import ChatRenderer, RefusedConversationError, render
from tasks.trainer.data.read import Conversation, Message
from tasks.trainer.errors import InputError

TokenizerOf = Callable[..., PreTrainedTokenizerBase]


def conversation(*turns: str | Message, system: str | None = None) -> Conversation:
    """User and assistant in turn; a Message stands for itself."""
    messages = [Message("system", system)] if system else []
    for number, turn in enumerate(turns):
        role = "assistant" if number % 2 else "user"
        messages.append(turn if isinstance(turn, Message) else Message(role, turn))
    return Conversation("test", 1, tuple(messages))


def runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def supervised(tokenizer: PreTrainedTokenizerBase, conv: Conversation, eos: Sequence[int]) -> list[str]:
    ids, mask = render(tokenizer, conv, eos)
    assert ids.dtype == np.int32
    assert mask.dtype == np.bool_
    assert ids.shape == mask.shape
    return [tokenizer.decode(ids[a:b].tolist()) for a, b in runs(mask)]


MULTI_TURN = conversation(
    "What does the eagle see?",
    "The river,\n\nthe hills.",
    "end",
    "end",  # the answer's text occurs in the prompt and inside "<|im_end|>"
    "And in Greek: ἀετός?",
    "ἀετός 🦅",
)
ANSWERS = ["The river,\n\nthe hills.", "end", "ἀετός 🦅"]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("chatml", "<|im_end|>"),
        ("chatml_tagged", "<|im_end|>"),
        ("chatml_tagged_content", "<|im_end|>"),
        ("chatml_tagged_wrong", "<|im_end|>"),
        ("chatml_strip", "<|im_end|>"),
        ("headers", "<|eot|>"),
        ("closed", "<|eot|>"),
    ],
)
def test_supervised_tokens_decode_to_answer_and_end_of_turn(
    tokenizer_of: TokenizerOf, eos_ids: tuple[int, ...], family: str, end: str, trim_offsets: bool
) -> None:
    """Red when the header, the newline after the turn, a second BOS or the user's text is supervised, or the end of
    turn is not; and when trimmed offsets or multi-byte characters shift an edge."""
    tokenizer = tokenizer_of(family, trim_offsets=trim_offsets)
    assert supervised(tokenizer, MULTI_TURN, eos_ids) == [answer + end for answer in ANSWERS]
    ids, _ = render(tokenizer, MULTI_TURN, eos_ids)
    text = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in MULTI_TURN.messages], tokenize=False
    )
    assert tokenizer.decode(ids.tolist()) == text  # the whole text once: no BOS beside the template's


def test_words_as_headers_and_the_space_before_the_answer(tokenizer_of: TokenizerOf, eos_ids: tuple[int, ...]) -> None:
    """Red when trimmed offsets hide the space that the target generates with the first word."""
    for trim_offsets in (False, True):
        tokenizer = tokenizer_of("words", trim_offsets=trim_offsets)
        conv = conversation("What does it see?", "Nothing", "Why?", "two are")
        assert supervised(tokenizer, conv, eos_ids) == [" Nothing<|eos|>", " two are<|eos|>"]


def test_without_an_end_of_turn_token_the_content_ends_the_span(
    tokenizer_of: TokenizerOf, eos_ids: tuple[int, ...]
) -> None:
    """Red when the separator is supervised, or a token that straddles an edge is."""
    for trim_offsets in (False, True):
        tokenizer = tokenizer_of("no_end", trim_offsets=trim_offsets)
        # " the" is one token: its space belongs to the header "assistant: ".
        assert tokenizer.tokenize(" the eagle")[0] == "Ġthe"
        conv = conversation("a", "the eagle flies", "b", "A day.")
        assert supervised(tokenizer, conv, eos_ids) == [" eagle flies", "A day."]
        # "flies" is one token (its own space aside): the last letter is the template's.
        template = "{% for m in messages %}{{ m.content + 's\n' }}{% endfor %}"
        tokenizer = tokenizer_of(template, trim_offsets=trim_offsets)
        assert tokenizer.tokenize("eagle flies")[-1] == "Ġflies"
        assert supervised(tokenizer, conversation("a", "eagle flie"), eos_ids) == ["eagle"]


@pytest.mark.parametrize("family", ["chatml", "chatml_tagged", "chatml_tagged_content", "chatml_strip", "headers"])
def test_an_answer_cut_by_the_token_limit_has_no_end_of_turn(
    tokenizer_of: TokenizerOf, eos_ids: tuple[int, ...], family: str
) -> None:
    """Red when the template's end-of-turn token is supervised where the target never said it."""
    cut = Message("assistant", "end", "length")
    texts = supervised(tokenizer_of(family), conversation("end", cut, "go on", "The end"), eos_ids)
    assert texts[0] == "end"
    assert texts[1].startswith("The end<|")


def test_white_space_that_the_template_keeps_or_strips(tokenizer_of: TokenizerOf, eos_ids: tuple[int, ...]) -> None:
    """Red when content is searched for as given: the template has stripped it, or the header has a newline as well."""
    padded = conversation("q", "  The end \n", "r", Message("assistant", " \nThe end ", "length"))
    assert supervised(tokenizer_of("chatml_strip"), padded, eos_ids) == ["The end<|im_end|>", "The end"]
    assert supervised(tokenizer_of("chatml"), padded, eos_ids) == ["  The end \n<|im_end|>", " \nThe end "]


def test_a_template_that_rewrites_history_is_refused(tokenizer_of: TokenizerOf, eos_ids: tuple[int, ...]) -> None:
    """Red when an earlier answer is supervised in a form that the target did not say; one answer is fine."""
    tokenizer = tokenizer_of("reasoning")
    thought = "<think>\nhills\n</think>\n\nThe end"
    assert supervised(tokenizer, conversation("q", thought), eos_ids) == [thought + "<|im_end|>"]
    for first in (thought, "The end", "<"):
        with pytest.raises(RefusedConversationError, match=r"^template_rewrites_history$"):
            render(tokenizer, conversation("q", first, "r", "The end"), eos_ids)


def test_a_generation_prompt_that_opens_a_thought(tokenizer_of: TokenizerOf, eos_ids: tuple[int, ...]) -> None:
    """Red when an answer without the thought that the prompt opens is taken for what the target says next."""
    template = (
        "{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>' + m.content + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|><think>\n' }}{% endif %}"
    )
    tokenizer = tokenizer_of(template)
    with pytest.raises(RefusedConversationError, match=r"^template_rewrites_history$"):
        render(tokenizer, conversation("q", "The end"), eos_ids)
    assert supervised(tokenizer, conversation("q", "<think>\nhills"), eos_ids) == ["hills<|eot|>"]


def test_tags_at_wrong_positions_are_not_believed(tokenizer_of: TokenizerOf, eos_ids: tuple[int, ...]) -> None:
    """Red when a tagged span is used though it holds an end of turn but not the answer: here it covers the prompt."""
    answer = "The river, the hills and the end of the day."
    texts = supervised(tokenizer_of("chatml_tagged_wrong"), conversation("a", answer), eos_ids)
    assert texts == [answer + "<|im_end|>"]


@pytest.mark.parametrize(
    ("reason", "turns"),
    [
        ("starts_with_answer", (Message("assistant", "a"), Message("user", "q"))),
        ("empty_answer", ("q", " \n")),
        ("end_of_turn_inside_answer", ("q", "a<|im_end|>b")),
        ("template_refused", ("q", "a", Message("assistant", "a"))),
    ],
)
def test_refusals_have_a_reason_and_no_text(
    tokenizer_of: TokenizerOf, eos_ids: tuple[int, ...], reason: str, turns: tuple[str | Message, ...]
) -> None:
    """Red when such a conversation becomes a sample, or the template's own message (it may quote) gets out."""
    with pytest.raises(RefusedConversationError, match=rf"^{reason}$"):
        render(tokenizer_of("alternating"), conversation(*turns), eos_ids)


def test_an_unusable_tokenizer_is_the_users_mistake(tokenizer_of: TokenizerOf, eos_ids: tuple[int, ...]) -> None:
    """Red when a missing or broken template or a model without end-of-turn tokens is found out later, or vaguely."""
    with pytest.raises(InputError, match=r"has no chat template: set target\.chat_template"):
        ChatRenderer(tokenizer_of(None), eos_ids)
    with pytest.raises(InputError, match=r"cannot be used: .*; set target\.chat_template") as caught:
        ChatRenderer(tokenizer_of("{% for m in messages %}{{ m.content }"), eos_ids)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no end-of-turn token"):
        ChatRenderer(tokenizer_of("chatml"), ())


def test_template_arguments_reach_every_rendering(tokenizer_of: TokenizerOf, eos_ids: tuple[int, ...]) -> None:
    """Red when a variable of the template is passed to one rendering and not to another."""
    template = "{{ '<|head|>' + today + '<|/head|>' }}" + (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content + '<|eot|>' }}{% else %}"
        "{% generation %}{{ m.content + '<|eot|>' }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    renderer = ChatRenderer(tokenizer_of(template), eos_ids, template_arguments={"today": "The day"})
    ids, mask = renderer.render(conversation("q", "end"))
    assert renderer.tokenizer.decode(ids.tolist()) == "<|head|>The day<|/head|>q<|eot|>end<|eot|>"
    assert renderer.tokenizer.decode(ids[mask].tolist()) == "end<|eot|>"
    assert renderer.prompt_ids([Message("user", "q")]) == ids[: len(ids) - int(mask.sum())].tolist()


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda text: text.strip() != "")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(TEXT, TEXT, st.booleans()), min_size=1, max_size=3), data=st.data())
def test_rows_of_the_mask(
    tokenizer_of: TokenizerOf,
    eos_ids: tuple[int, ...],
    turns: list[tuple[str, str, bool]],
    data: st.DataObject,
) -> None:
    """Red when runs and answers do not match one to one, or a run's edge moves: then the rows that training counts
    (x[p+1] .. x[p+2+k] all supervised) are not max(0, A - 1 - k) for an answer of A tokens."""
    tokenizer = tokenizer_of(data.draw(st.sampled_from(["chatml", "chatml_tagged", "chatml_tagged_content"])))
    messages: list[str | Message] = []
    for question, answer, cut in turns:
        messages += [question, Message("assistant", answer, "length" if cut else "stop")]
    ids, mask = render(tokenizer, conversation(*messages), eos_ids)
    found = runs(mask)
    lengths = []
    for (start, stop), (_, answer, cut) in zip(found, turns, strict=True):
        own = tokenizer.encode(answer, add_special_tokens=False)
        # A special token stands on either side of the tokens below, but for the header's newline, which an answer that
        # starts with white space may merge with: such a token straddles the edge and is left out.
        if not answer[0].isspace():
            assert ids[start:stop].tolist() == own + ([] if cut else [tokenizer.eos_token_id])
        lengths.append(stop - start)
    for k in range(4):
        rows = sum(bool(mask[p + 1 : p + 3 + k].all()) for p in range(len(ids) - 2 - k))
        assert rows == sum(max(0, length - 1 - k) for length in lengths)


def test_the_real_smollm2(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Red when the demo target's template puts anything but answer and <|im_end|> under supervision."""
    eos = (smollm2_tokenizer.eos_token_id,)
    expected = [answer + "<|im_end|>" for answer in ANSWERS]
    assert supervised(smollm2_tokenizer, MULTI_TURN, eos) == expected
    ids, mask = render(smollm2_tokenizer, MULTI_TURN, eos)
    assert smollm2_tokenizer.decode(ids[-1:].tolist()) == "\n"
    assert not mask[-1]
    prompt = ChatRenderer(smollm2_tokenizer, eos).prompt_ids(MULTI_TURN.messages[:1])
    assert prompt == ids[: len(prompt)].tolist()  # served and trained contexts agree
    assert mask[len(prompt)]
