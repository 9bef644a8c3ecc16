"""``<|channel|>commentary to=functions.NAME<|message|>{...}<|call|>``: gpt-oss, as passed on by ``HarmonyReader``."""

from __future__ import annotations

import json

from ....protocol.reasoning import CHANNEL, MESSAGE
from .hermes import HermesParser
from .parser import UNREADABLE, Call, call_of

CALL_START, CALL_END = f"{CHANNEL}commentary to=functions.", "<|call|>"


class HarmonyParser(HermesParser):
    """What precedes the name of a tool is text; what lies between that and the end mark is a call."""

    start, end = CALL_START, CALL_END

    def call_in(self, text: str) -> Call | None:
        head, mark, arguments = text.partition(MESSAGE)
        name = head.split(maxsplit=1)[:1]  # a constraint may follow, which announces JSON
        try:
            return call_of({"name": name[0], "arguments": json.loads(arguments or "{}")}) if mark and name else None
        except UNREADABLE:
            return None
