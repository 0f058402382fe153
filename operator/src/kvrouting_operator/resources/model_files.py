"""Where a container finds the model and its tokenizer: arguments, volumes, mounts, environment."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouting_operator.pool import Object
from kvrouting_operator.resources.pod_parts import (
    MODEL_PATH,
    MODEL_VOLUME,
    TOKENIZER_PATH,
    TOKENIZER_VOLUME,
    claim_volume,
    mount,
    secret_env,
)
from kvrouting_operator.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """location: folder or name on the hub; empty: there is none. revision: empty: the hub's newest, or no hub."""

    location: str
    revision: str = ""
    volumes: tuple[Object, ...] = ()
    mounts: tuple[Object, ...] = ()
    env: tuple[Object, ...] = ()


def model_files(model: ModelSpec) -> ModelFiles:
    """Of the weights."""
    volume, hub = model.source.volume, model.source.hub
    if volume is not None:
        if volume.claim_name is None:
            return ModelFiles(location=volume.path)
        return ModelFiles(
            location=volume.path,
            volumes=(claim_volume(MODEL_VOLUME, volume.claim_name, read_only=True),),
            mounts=(mount(MODEL_VOLUME, MODEL_PATH),),
        )
    token = (secret_env("HF_TOKEN", hub.token_secret),) if hub is not None and hub.token_secret else ()
    return ModelFiles(location=model.name, revision=model.revision or "", env=token)


def tokenizer_files(model: ModelSpec) -> ModelFiles:
    """Of the tokenizer."""
    source = model.tokenizer
    if source.kind == "model":
        return model_files(model)
    if source.kind == "hub":
        return ModelFiles(location=source.name or "", revision=source.revision or "", env=model_files(model).env)
    if source.kind == "bytes":
        return ModelFiles(location="bytes")
    if source.kind == "none":
        return ModelFiles(location="")
    return _mounted_tokenizer(model)


def _mounted_tokenizer(model: ModelSpec) -> ModelFiles:
    source = model.tokenizer
    if source.kind == "configMap":
        volume: Object = {"name": TOKENIZER_VOLUME, "configMap": {"name": source.name}}
        return ModelFiles(
            location=source.path or TOKENIZER_PATH, volumes=(volume,), mounts=(mount(TOKENIZER_VOLUME, TOKENIZER_PATH),)
        )
    if source.claim_name is None:
        return ModelFiles(location=source.path or "")
    return ModelFiles(
        location=source.path or TOKENIZER_PATH,
        volumes=(claim_volume(TOKENIZER_VOLUME, source.claim_name, read_only=True),),
        mounts=(mount(TOKENIZER_VOLUME, TOKENIZER_PATH),),
    )
