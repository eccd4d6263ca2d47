"""API keys: where they come from, what they look like, and what happens when their file changes."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, Unauthorized
from gateway_svc.http.api_keys import ApiKeys, KeyLimits

SECRET = "sk-first-secret"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def write(file: Path, text: str, version: int) -> None:
    file.write_text(text)
    os.utime(file, ns=(version, version))


def test_without_keys_none_is_required() -> None:
    assert not ApiKeys().is_required


def test_a_key_is_known_as_itself_and_by_its_digest() -> None:
    digest = hashlib.sha256(b"sk-second-secret").hexdigest()
    keys = ApiKeys([SECRET, f"sha256:{digest}"])
    assert keys.is_required
    assert keys.authenticate(f"Bearer {SECRET}").name.startswith("key-")
    assert keys.authenticate("bearer  sk-second-secret ").name == f"key-{digest[:8]}"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", SECRET, f"Basic {SECRET}", f"Bearer {SECRET}x", "Bearer \udcff"]
)
def test_anything_else_is_refused_without_being_repeated(header: str | None) -> None:
    with pytest.raises(Unauthorized) as caught:
        ApiKeys([SECRET]).authenticate(header)
    assert SECRET not in caught.value.message


def test_no_key_is_kept_in_memory() -> None:
    keys = ApiKeys([SECRET])
    assert SECRET not in repr(vars(keys))


def test_a_file_names_keys_and_gives_each_its_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "# tenants\n\nalice sk-alice-secret requests_per_minute=60 max_inflight=2\nsk-nameless-secret  # of bob\n"
    )
    keys = ApiKeys([SECRET], file, limits=KeyLimits(max_inflight=9))
    alice = keys.authenticate("Bearer sk-alice-secret")
    assert (alice.name, alice.limits) == ("alice", KeyLimits(60.0, 2))
    assert keys.authenticate("Bearer sk-nameless-secret").limits == KeyLimits(max_inflight=9)
    assert keys.authenticate(f"Bearer {SECRET}").limits == KeyLimits(max_inflight=9)


def test_a_changed_file_is_read_anew_without_a_restart(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock()
    write(file, "sk-old-secret\n", 1)
    keys = ApiKeys((), file, time_s=clock)
    write(file, "sk-new-secret\n", 2)
    clock.now = 0.5
    assert keys.authenticate("Bearer sk-old-secret")
    clock.now = 1.5
    assert keys.authenticate("Bearer sk-new-secret")
    with pytest.raises(Unauthorized):
        keys.authenticate("Bearer sk-old-secret")


@pytest.mark.parametrize("text", ["", "short\n", "a b c\n", None])
def test_a_file_that_has_become_unusable_leaves_the_last_good_keys(
    tmp_path: Path, text: str | None, logs: list[Any]
) -> None:
    file, clock = tmp_path / "keys", Clock()
    write(file, "sk-old-secret\n", 1)
    keys = ApiKeys((), file, time_s=clock)
    if text is None:
        file.unlink()
    else:
        write(file, text, 2)
    clock.now = 1.5
    assert keys.authenticate("Bearer sk-old-secret")
    assert [line["log_level"] for line in logs] == ["error"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("short\n", "line 1 .* 5 characters"),
        ("\na b c d\n", "line 2 .* not 'KEY'"),
        ("sk-secret-secret nonsense=3\n", "line 1 .* 'nonsense' that does not exist"),
        ("ä sk-secret-secret\n", "line 1 .* name"),
        ("sk-secret-secret max_inflight=many\n", "line 1 .* not a number"),
        ("sk-secret-secret max_inflight=-1\n", "line 1 .* negative"),
        ("sk-secret-secret requests_per_minute=nan\n", "line 1 .* negative"),
        ("sha256:abc\n", "line 1 .* digest"),
    ],
)
def test_a_file_that_is_wrong_at_the_start_says_where(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        ApiKeys((), file)
    assert "sk-secret" not in caught.value.message


def test_a_file_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys((), tmp_path / "none")
