"""Whether a JSON schema that a client sent is one, and what is added to every schema that an answer follows.

The gateway refuses a wrong schema with the client's own field named, the decoder because it trusts no gateway: both by
these rules. Pure; nothing is ever fetched for a schema.
"""

from typing import Any

import jsonschema_rs

# Models are known to write white space for ever where any is allowed.
WHITESPACE_PATTERN = r"[\x20\x0A\x0D\x09]{1,64}"


def _no_retrieval(uri: str) -> Any:
    raise LookupError(uri)


# The meta-schema as a schema of ours, so that a client's own `$schema` and `$ref` are plain values.
META_SCHEMA = jsonschema_rs.Draft202012Validator(
    {"$ref": "https://json-schema.org/draft/2020-12/schema"}, retriever=_no_retrieval
)
