"""The OpenAPI document of the admin API, made from the verbs."""

from __future__ import annotations

from typing import Any

import msgspec

from dsv4ctl.controlplane.admin.errors import STATUS
from dsv4ctl.controlplane.admin.registry import VERBS
from dsv4ctl.controlplane.admin.verb import Verb
from dsv4ctl.controlplane.admin.verbs.version import here

PATH = "/openapi.json"
_REF = "#/components/schemas/{name}"
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {"code": {"type": "string", "enum": list(STATUS)}, "message": {"type": "string"}},
        }
    },
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    for verb in VERBS:
        for path in verb.paths:
            paths[path] = {verb.method.lower(): _operation(verb, path)}
    _, schemas = msgspec.json.schema_components(
        [verb.args for verb in VERBS if not verb.reads and verb.args.__struct_fields__], ref_template=_REF
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dsv4ctl admin API",
            "version": here()["version"],
            "description": "HTTP/1.1 over a Unix socket; callers need the owner's uid, or root.",
        },
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR}},
    }


def _operation(verb: Verb[Any], path: str) -> dict[str, Any]:
    in_path = "{" in path
    operation: dict[str, Any] = {
        "operationId": f"{verb.name}_one" if in_path else verb.name,
        "summary": verb.help,
        "responses": {
            "200": {
                "description": "The answer",
                "content": {verb.content_type.partition(";")[0]: {"schema": {}}},
            },
            "default": {
                "description": "Why not",
                "content": {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}},
            },
        },
    }
    if verb.reads:
        operation["parameters"] = _parameters(verb, path)
    elif verb.args.__struct_fields__:
        schema = {"$ref": _REF.format(name=verb.args.__name__)}
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return operation


def _parameters(verb: Verb[Any], path: str) -> list[dict[str, Any]]:
    properties = msgspec.json.schema(verb.args)["$defs"][verb.args.__name__]["properties"]
    parameters = []
    for name, schema in properties.items():
        in_path = f"{{{name}}}" in path
        parameters.append(
            {
                "name": name,
                "in": "path" if in_path else "query",
                "required": in_path,
                "schema": {key: value for key, value in schema.items() if key != "description"},
                "description": schema.get("description", ""),
            }
        )
    return parameters
