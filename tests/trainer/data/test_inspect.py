"""`eyas data inspect`: right figures, what is supervised and what is cut, and no text where none belongs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.cli import main

SECRET = "the secret of the old birds"


def run(arguments: list[str]) -> None:
    """The command, which ends well."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


def write(path: Path) -> str:
    ask = {"role": "user", "content": "the young eagle"}
    rows = [
        {"messages": [ask, {"role": "assistant", "content": SECRET}]},
        {"messages": [ask, {"role": "assistant", "content": SECRET}]},
        {"messages": [ask, {"role": "assistant", "content": "night <b>comes</b> " * 20}]},
        {"messages": [{**ask, "content": [{"type": "image_url"}]}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_figures_for_scripts(target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a count is wrong, a duplicate or a bad record is not told, or the figures carry text."""
    source = write(tmp_path / "a.jsonl")
    run(["data", "inspect", source, "--target", str(target_folder), "--set", "data.max_tokens=64", "--json"])
    text = capsys.readouterr().out
    found = json.loads(text)
    assert (found["conversations"], found["samples"], found["answers"]) == (3, 2, 2)
    assert found["refused"] == {"multimodal_image_url": 1, "duplicate": 1}
    assert found["refused_first"]["multimodal_image_url"] == f"{source}, line 4"
    assert found["same_prompt"] == 2
    assert found["cut"] == 1
    assert 0 < found["supervised_cut"] < found["supervised"] < found["tokens"]
    assert set(found["role_tokens"]) == {"user", "assistant"}
    assert found["coverage"] == {"300": 1.0}
    assert "secret" not in text


def test_page_and_text_show_what_is_supervised_and_cut(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when the page is not whole by itself, text becomes markup, or a piece has another's colour."""
    source, page = write(tmp_path / "a.jsonl"), tmp_path / "page.html"
    run(["data", "inspect", source, "--target", str(target_folder), "--set", "data.max_tokens=64", "--html", str(page)])
    shown = capsys.readouterr().out
    assert SECRET in shown
    assert f"page: {page}" in shown
    html = page.read_text()
    assert f'<span class="s">{SECRET}&lt;|im_end|&gt;</span>' in html
    assert '<span class="p">&lt;|im_start|&gt;user\nthe young eagle&lt;|im_end|&gt;' in html
    assert '<span class="c">' in html
    assert "<b>comes" not in html
    assert "&lt;b&gt;comes" in html
    assert "data:image/png;base64," in html
    assert "http" not in html.replace(source, "")


def test_a_recipe_says_what_to_look_at(target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when the recipe's own data settings are not those that are looked with, or a mistake is a traceback."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps({"target": {"model": str(target_folder)}, "data": {"source": write(tmp_path / "a.jsonl")}})
    )
    for arguments, message in (
        (["--recipe", str(recipe)], r"line 4: message 1"),
        (["a.jsonl"], "needs --recipe RECIPE.yaml, or files and --target MODEL"),
        ([str(tmp_path / "none.jsonl"), "--target", str(target_folder)], "does not exist"),
        ([str(tmp_path / "a.jsonl"), "--target", str(tmp_path / "none")], "no such file or folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["data", "inspect", *arguments])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert message in said
        assert "secret" not in said
    run(["data", "inspect", "--recipe", str(recipe), "--set", "data.on_error=skip", "--limit", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["conversations"] == 1
