"""A tenants' file for tests: two tenants, one that may do little, and an operator."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

KEYS = {name: f"key-of-{name}" for name in ("alice", "bob", "mallory", "operator")}


def hashed(key: str) -> str:
    return f'"sha256:{sha256(key.encode()).hexdigest()}"'


def bearer(who: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[who]}"}


def write(folder: Path, more: str = "", *, alice: str = "", top: str = "") -> str:
    """Write the file, `more` at its end, `alice` in alice's table, `top` at the top; returns where."""
    (folder / "secret").write_text("s" * 40)
    file = folder / "tenants.toml"
    file.write_text(
        f"""secret_file = "secret"
operators = [{hashed(KEYS["operator"])}]
{top}
[tenants.alice]
keys = [{hashed(KEYS["alice"])}]
{alice}
[tenants.bob]
keys = [{hashed("bobs-old-key")}, {hashed(KEYS["bob"])}]
{more}
"""
    )
    return str(file)
