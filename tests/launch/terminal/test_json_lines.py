from __future__ import annotations

import json

from triptych.launch.terminal.json_lines import json_line


def test_row_is_one_line_for_any_content() -> None:
    row = {"text": "".join(map(chr, [*range(0x3000), 0x1F642])), "é\u2028": 1}
    [line] = json_line(row).splitlines()
    assert json.loads(line) == row
    assert "🙂" in line
