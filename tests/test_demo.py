"""The demo runs the example twice under the real launcher, and finds the losses equal."""

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo.py"


def test_a_short_demo() -> None:
    result = subprocess.run([sys.executable, str(DEMO), "--steps", "4"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "All 4 losses are equal, bit for bit." in result.stdout
    row, = (line for line in result.stdout.splitlines() if "bubble, predicted" in line)
    # 1F1B: (p - 1) / (m + p - 1) with p = m = 2; split and reused twice: a wait of half a forward in 13 halves.
    assert "33.3 %" in row
    assert "7.7 %" in row
