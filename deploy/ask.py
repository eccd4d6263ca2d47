"""`tandem ask`: pictures and a question to a running server, its answer streamed to the terminal."""

import base64
import mimetypes
import sys
from pathlib import Path
from typing import Annotated, Any

import openai
from cyclopts import Parameter

from common.errors import InvalidRequest
from common.settings import Port, command_line

URL_SCHEMES = ("http://", "https://", "data:")


def ask(
    *words: Annotated[str, Parameter(name="IMAGE... QUESTION", show_env_var=False)],
    url: str | None = None,
    port: Port = 8000,
    served_model_name: str | None = None,
    api_key: str = "none",
    max_tokens: int | None = None,
) -> None:
    """Ask a question about any number of pictures and videos.

    The last word is the question; those before it are files or URLs, in order.

    Parameters
    ----------
    words
        Files or URLs of pictures and videos, then the question, in quotes.
    url
        The server's base URL; by default that of this machine.
    port
        Port of a server on this machine, where no URL is given.
    served_model_name
        Name of the model; by default the first that the server lists.
    api_key
        Sent as bearer token.
    max_tokens
        Longest answer; by default as long as the context allows.
    """
    if not words:
        raise InvalidRequest("no question was given: tandem ask IMAGE... 'What is in the picture?'")
    *media, question = words
    parts: list[Any] = [_media_part(word) for word in media]
    url = url or f"http://127.0.0.1:{port}/v1"
    client = openai.OpenAI(base_url=url, api_key=api_key)
    try:
        chosen = served_model_name or _first_model(client)
        stream = client.chat.completions.create(
            model=chosen,
            messages=[{"role": "user", "content": [*parts, {"type": "text", "text": question}]}],
            stream=True,
            max_completion_tokens=max_tokens,
        )
        for chunk in stream:
            if chunk.choices:
                sys.stdout.write(chunk.choices[0].delta.content or "")
                sys.stdout.flush()
        sys.stdout.write("\n")
    except openai.APIConnectionError as exc:
        raise InvalidRequest(f"no server answers at {url}: start one with `make up`, or give --url") from exc
    except openai.APIStatusError as exc:
        raise InvalidRequest(f"the server answered {exc.status_code}: {exc.message}") from exc
    except openai.APIError as exc:  # an error event in the stream
        raise InvalidRequest(f"the answer broke off: {exc.message}") from exc


def _first_model(client: openai.OpenAI) -> str:
    models = client.models.list().data
    if not models:
        raise InvalidRequest("the server lists no model: name one with --served-model-name")
    return models[0].id


def _media_part(word: str) -> dict[str, Any]:
    """A file or URL as a content part; videos are told by their name."""
    guessed = mimetypes.guess_type(word.partition("?")[0])[0] or "image/png"
    kind = "video_url" if guessed.startswith("video/") else "image_url"
    if word.startswith(URL_SCHEMES):
        if word.startswith("data:video/"):
            kind = "video_url"
        return {"type": kind, kind: {"url": word}}
    try:
        data = Path(word).read_bytes()
    except OSError as exc:
        raise InvalidRequest(
            f"{word} cannot be read ({exc.strerror}): give a file or a URL, and the question last"
        ) from exc
    return {"type": kind, kind: {"url": f"data:{guessed};base64,{base64.b64encode(data).decode()}"}}


app = command_line("ask", ask)
