# SPDX-License-Identifier: MIT
"""A strictly typed program of a user, for mypy: it passes only where outcomes and errors narrow as they should."""

from __future__ import annotations

import pathlib

from llama_info import Client, Hit, HttpError, InferError, Props, SlotInfo, Timings, cache_outcome, prompt_kept


def report(previous: Timings, current: Timings) -> str:
    outcome = cache_outcome(previous, current)
    if isinstance(outcome, Hit):
        return "hit"
    short: int = outcome.expected - outcome.got  # a Loss, as nothing else is left
    kept: bool = prompt_kept(previous, current)
    return f"{short} tokens short, {kept}"


def ask(client: Client) -> tuple[Props, list[SlotInfo], int] | int | str:
    try:
        return client.props(), client.slots(), client.tokenize("text")
    except HttpError as error:
        return error.status
    except InferError as error:
        return str(error)


def last(client: Client, answer: dict[str, dict[str, object]]) -> bytes | Timings:
    return Timings.from_dict(answer["timings"]) if answer else client.call("POST", "/x", memoryview(b""))


CLIENTS = [Client("s", "m"), Client(b"s", "m", api_key="k"), Client(pathlib.Path("s"), "m", liveness_ms=0.5)]
