"""How texts are split before tokens are merged, by the names that files have for it: a byte-level tokenizer's ways that
transformers does not know, as the published tokenizers have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Step = dict[str, Any]  # of a pre-tokenizer in a tokenizer.json


def _isolated(pattern: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(*, splits: bool) -> Step:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits}


_DIGITS: Step = {"type": "Digits", "individual_digits": True}
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}"
_QWEN2 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}"
_SEED = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BREAKS}"
_LONG_BLANKS = "".join(rf"\s{{{size}}}(?!\S)|" for size in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = (
    rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    rf"|{_LONG_BLANKS}\s{{1,2}}(?!\S)|\s{{1}}"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
_YOUTU = rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BREAKS}"
_CHINESE_OF_YOUTU = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_CHINESE, _KANA = "[一-龥ࠀ-一가-퟿]+", "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BREAKS}"
)
_LATIN_OF_DEEPSEEK = (  # letters of scripts with two cases; escaped, as some look like others
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
_BLOOM = " ?[^(\\s|[.,!?…。，、।۔،])]+"

_DIGITS_FIRST = [_DIGITS, _byte_level(splits=True)]
_AS_DEEPSEEK3 = [_isolated(r"\p{N}{1,3}"), _isolated(_KANA), _isolated(_DEEPSEEK3), _byte_level(splits=False)]
_AS_QWEN2 = [_isolated(_QWEN2), _byte_level(splits=False)]
_AS_LLAMA3 = [_isolated(_LLAMA3), _byte_level(splits=False)]
SPLITS: Mapping[str, list[Step]] = {
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_FIRST
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _AS_DEEPSEEK3),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _AS_QWEN2),
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe"), _AS_LLAMA3),
    "bloom": [_isolated(_BLOOM), _byte_level(splits=False)],
    "deepseek-llm": [
        _isolated("[\r\n]"), _isolated(_LATIN_OF_DEEPSEEK), _isolated(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
        _isolated(r"\s+$"), _isolated(_CHINESE), _DIGITS, _byte_level(splits=False),
    ],
    "deepseek-coder": [
        _isolated("[\r\n]"), _isolated(r"\s?\p{L}+"), _isolated(r"\s?\p{P}+"), _isolated(_CHINESE), _DIGITS,
        _byte_level(splits=False),
    ],
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"}, _byte_level(splits=True),
        {"type": "Digits", "individual_digits": False}, _isolated("[0-9][0-9][0-9]"),
    ],
    "jais-2": [_isolated(_JAIS2), _byte_level(splits=False)],
    "seed-coder": [_isolated(_SEED), _byte_level(splits=False)],
    "youtu": [_isolated(_CHINESE_OF_YOUTU), _isolated(_YOUTU), _byte_level(splits=False)],
}  # fmt: skip
# Split as for GPT-2, which is transformers' default.
AS_GPT2 = {
    "gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2", "exaone4", "gigachat", "a.x-4.0",
}  # fmt: skip
# Vocabularies in which a word that is a token is not made of others, whether a file says so or not.
WITH_WHOLE_WORDS = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
    "glm4", "glm5", "youtu",
}  # fmt: skip
# A text begins with <bos> unless the file says that it does not.
WITH_BOS = WITH_WHOLE_WORDS - {"glm4", "glm5", "youtu"}
