"""Chat templates with tools, shortened from those of real families: what each shows of tools, calls, their answers and
reasoning, and the marks that separate them, are the real one's."""

from pathlib import Path

FAMILIES = {file.stem: file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.jinja"))}
