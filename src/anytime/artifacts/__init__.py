"""Safe files: atomic writes, checksummed bundles, and tensors as safetensors only."""

from anytime.artifacts.bundles import (
    bundle_kind,
    bundle_names,
    bundle_reader,
    check_sealed,
    open_bundle,
    overwrites,
    read_bundle,
    read_sealed,
    seal,
    verify_bundle,
    write_bundle,
)
from anytime.artifacts.files import json_text, make_folder, replace_file, typed_errors, write_bytes, write_json, write_text
from anytime.artifacts.tensors import tensors_from_bytes, tensors_to_bytes

__all__ = [
    "bundle_kind",
    "bundle_names",
    "bundle_reader",
    "check_sealed",
    "json_text",
    "make_folder",
    "open_bundle",
    "overwrites",
    "read_bundle",
    "read_sealed",
    "replace_file",
    "seal",
    "tensors_from_bytes",
    "tensors_to_bytes",
    "typed_errors",
    "verify_bundle",
    "write_bundle",
    "write_bytes",
    "write_json",
    "write_text",
]
