"""A chat template of the operator's in place of the checkpoint's."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych import Driver
from triptych.protocol.config import HASH_MODEL
from triptych.protocol.errors import ConfigError, WorkerDied

OWN = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"
CHAT = [{"role": "user", "content": "Grüße"}]
RENDERED = "<user> Grüße\n<assistant>"


def test_chats_are_rendered_by_the_file_as_it_was_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(OWN, encoding="utf-8")
    with Driver(HASH_MODEL, chat_template=str(file)) as driver:
        plain = driver.generate(RENDERED, max_tokens=8)
        assert driver.generate(messages=CHAT, max_tokens=8).text == plain.text
        file.write_text("{{ 'something else' }}")
        driver.restart("prepare")
        assert driver.generate(messages=CHAT, max_tokens=8).text == plain.text


def test_next_driver_of_the_run_directory_has_the_checkpoint_s_again(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(OWN)
    texts = []
    for own in (str(file), None):
        with Driver(HASH_MODEL, run_dir=tmp_path / "run", chat_template=own) as driver:
            texts.append(driver.generate(messages=CHAT, max_tokens=8).text)
    with Driver(HASH_MODEL) as driver:
        assert driver.generate(messages=CHAT, max_tokens=8).text == texts[1] != texts[0]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, ConfigError, r"chat_template '.*/own\.jinja' cannot be read: No such file"),
        (b"\xff\xfe", ConfigError, r"chat_template '.*/own\.jinja' cannot be read: 'utf-8' codec"),
        (b"{% for m in messages %}\n{{ m.role }", WorkerDied, r"(?s)prepare.*chat_template is not valid: line 2: "),
    ],
    ids=["missing", "no text", "no template"],
)
def test_bad_file_is_refused_at_the_start(
    tmp_path: Path, content: bytes | None, error: type[Exception], message: str
) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(error, match=message):
        Driver(HASH_MODEL, chat_template=str(file)).start()
