"""`python -m tests.golden`: writes the golden files."""

from tests.golden.behaviour import FILES, behaviours

FILES.mkdir(exist_ok=True)
makers = behaviours()
for path in FILES.iterdir():
    if path.name not in makers:
        path.unlink()
for name, make in makers.items():
    (FILES / name).write_text(make(), encoding="utf-8")
