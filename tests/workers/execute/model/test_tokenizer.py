from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.tiny import CHAT_TEMPLATE, VOCAB_SIZE, make_tiny_tokenizer
from triptych.protocol.errors import ConfigError
from triptych.protocol.tokenizer_files import FACTS_FILE, TokenizerFacts, load_facts, load_tokenizer_json
from triptych.workers.execute.model.tokenizer import load_tokenizer, write_tokenizer
from triptych.workers.prepare.chat_template import ChatTemplate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_both_files_are_written(folder: Path, tmp_path: Path) -> None:
    facts = export(folder, tmp_path)
    assert load_facts(tmp_path) == facts
    tokenizer = Tokenizer.from_str(load_tokenizer_json(tmp_path))
    assert tokenizer.decode(tokenizer.encode("Grüße 🙂").ids) == "Grüße 🙂"


def test_facts_match_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    facts = export(folder, tmp_path)
    assert (facts.vocab_size, facts.bos_token_id, facts.chat_template) == (259, 1, CHAT_TEMPLATE)
    assert facts.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def test_vocabulary_size_includes_the_greatest_added_token(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["<|tool|>"])
    tokenizer.save_pretrained(tmp_path / "model")
    assert export(tmp_path / "model", tmp_path).vocab_size == 260


@pytest.mark.parametrize("is_in_vocabulary", [False, True])
def test_added_tokens_beyond_the_model_are_plain_text(
    is_in_vocabulary: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Like Gemma 3 without its vision part: its tokenizer has one token more than the model, the image placeholder."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "model")
    if is_in_vocabulary:
        file = tmp_path / "model" / "tokenizer.json"
        content = json.loads(file.read_text())
        content["model"]["vocab"]["<image>"] = 259
        file.write_text(json.dumps(content))
    facts = export(tmp_path / "model", tmp_path, vocab_size=259)
    written = Tokenizer.from_str(load_tokenizer_json(tmp_path))
    assert facts.vocab_size == 259
    assert max(written.encode("an <image>").ids) < 259
    assert written.decode(written.encode("an <image>").ids) == "an <image>"
    assert "the model has no ids for 1 tokens of its tokenizer: <image>" in caplog.text


@pytest.mark.parametrize("vocab_size", [258, 2])
def test_tokenizer_of_another_model_is_refused_with_both_numbers(vocab_size: int, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the tokenizer has 259 ids and the model {vocab_size}"):
        export(folder, tmp_path, vocab_size=vocab_size)
    assert not (tmp_path / FACTS_FILE).exists()


def test_end_token_must_be_in_the_model(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="the tokenizer has 260 ids and the model 259"):
        export(tmp_path / "model", tmp_path, vocab_size=259)


def test_truncation_and_padding_are_not_exported(folder: Path, tmp_path: Path) -> None:
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(file))
    export(folder, tmp_path)
    assert len(Tokenizer.from_str(load_tokenizer_json(tmp_path)).encode("twenty characters ..").ids) == 20


def test_template_in_a_separate_file_is_found(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 'apart' }}")
    assert export(folder, tmp_path).chat_template == "{{ 'apart' }}"


def test_default_template_of_several_is_used(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit_tokenizer_config(
        folder, chat_template=[{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    )
    assert export(folder, tmp_path).chat_template == "D"


def test_template_for_tools_is_used_for_chats_with_tools(folder: Path, tmp_path: Path) -> None:
    """As of Hermes 3: its default template has no tools, so they were refused."""
    (folder / "chat_template.jinja").unlink()
    templates = {
        "default": "\n{% if tools %}!{% endif %}\nD\n",
        "tool_use": "{% for tool in tools %}{{ tool }}{% endfor %}\n ",
    }
    edit_tokenizer_config(folder, chat_template=[{"name": name, "template": templates[name]} for name in templates])
    facts = export(folder, tmp_path)
    for tools in (None, ["f"]):
        expected = ChatTemplate(templates["tool_use" if tools else "default"], {}).render([], tools=tools)
        assert ChatTemplate(facts.chat_template or "", {}).render([], tools=tools) == expected


def test_tokenizer_without_a_template_has_none(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert export(folder, tmp_path).chat_template is None


def test_directory_without_a_tokenizer_is_an_error_with_the_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer: none of tokenizer\.json"):
        export(tmp_path, tmp_path)
    assert not (tmp_path / FACTS_FILE).exists()


def test_damaged_tokenizer_is_an_error(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        export(folder, tmp_path)


def test_tokenizer_in_python_code_only_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\n[PAD]\n[SEP]\n[CLS]\n[MASK]\nhello\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ProphetNetTokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "prophetnet"}))
    with pytest.raises(ConfigError):
        export(tmp_path, tmp_path)


def export(folder: Path, run_dir: Path, *, vocab_size: int = VOCAB_SIZE) -> TokenizerFacts:
    return write_tokenizer(load_tokenizer(folder), run_dir, vocab_size=vocab_size)


def edit_tokenizer_config(folder: Path, **values: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
