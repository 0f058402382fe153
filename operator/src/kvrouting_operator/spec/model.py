"""Which model a pool serves and where it comes from."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvrouting_operator.spec.part import ObjectName, Part, Path, Rule
from kvrouting_operator.spec.references import SecretKey


class HubSource(Part, frozen=True, kw_only=True):
    """The model is downloaded from the Hugging Face hub."""

    token_secret: Annotated[
        SecretKey | None, Meta(description="Access token, for models that need one; passed as HF_TOKEN.")
    ] = None


class VolumeSource(Part, frozen=True, kw_only=True):
    """The model lies in a folder."""

    path: Annotated[
        Path, Meta(description="Folder of the model in the container; with a claim it begins with /models.")
    ]
    claim_name: Annotated[
        ObjectName | None,
        Meta(
            description="PersistentVolumeClaim that is mounted read-only at /models. Absent: the folder is in "
            "the image, or mounted by podTemplate."
        ),
    ] = None


class ModelSource(Part, frozen=True, kw_only=True):
    """Where the weights come from: hub or volume; neither means the hub without a token."""

    RULES = (Rule(cel="!(has(self.hub) && has(self.volume))", message="model.source has hub or volume, not both"),)

    hub: Annotated[HubSource | None, Meta(description="Download from the Hugging Face hub.")] = None
    volume: Annotated[VolumeSource | None, Meta(description="Read from a folder.")] = None

    def __post_init__(self) -> None:
        if self.hub is not None and self.volume is not None:
            raise ValueError("model.source has hub or volume, not both")


TokenizerKind = Literal["model", "hub", "volume", "configMap", "bytes", "none"]
_NEEDED = {"hub": "name", "configMap": "name", "volume": "path"}


class TokenizerSource(Part, frozen=True, kw_only=True):
    """Where the router's tokenizer comes from."""

    RULES = (
        Rule(
            cel="!(self.kind in ['hub', 'configMap']) || has(self.name)",
            message="tokenizer.name is needed with kind hub and configMap",
        ),
        Rule(cel="self.kind != 'volume' || has(self.path)", message="tokenizer.path is needed with kind volume"),
    )

    kind: Annotated[
        TokenizerKind,
        Meta(
            description="model: from where the model is; hub: another name on the hub; volume: a folder; "
            "configMap: files of a ConfigMap (tokenizer.json, tokenizer_config.json); bytes: a token is a byte, "
            "as the simulated engine has it; none: text is guessed, prefixes are approximate."
        ),
    ] = "model"
    name: Annotated[
        Annotated[str, Meta(max_length=253)] | None, Meta(description="Name on the hub, or of the ConfigMap.")
    ] = None
    revision: Annotated[Annotated[str, Meta(max_length=253)] | None, Meta(description="Revision on the hub.")] = None
    claim_name: Annotated[
        ObjectName | None, Meta(description="PersistentVolumeClaim that is mounted read-only at /tokenizer.")
    ] = None
    path: Annotated[
        Path | None, Meta(description="Folder of the tokenizer in the container; with a claim below /tokenizer.")
    ] = None

    def __post_init__(self) -> None:
        needed = _NEEDED.get(self.kind)
        if needed and getattr(self, needed) is None:
            raise ValueError(f"tokenizer.{needed} is needed with kind {self.kind}")


class ModelSpec(Part, frozen=True, kw_only=True):
    """The model of all workers of the pool. It cannot be changed: a pool for another model is another pool."""

    name: Annotated[
        str,
        Meta(
            description="Name on the hub, for example meta-llama/Llama-3.1-8B-Instruct.", min_length=1, max_length=253
        ),
    ]
    revision: Annotated[Annotated[str, Meta(max_length=253)] | None, Meta(description="Revision on the hub.")] = None
    served_name: Annotated[
        Annotated[str, Meta(min_length=1, max_length=253)] | None, Meta(description="Name in requests; default: name.")
    ] = None
    source: Annotated[ModelSource, Meta(description="Where the weights come from.")] = msgspec.field(
        default_factory=ModelSource
    )
    tokenizer: Annotated[TokenizerSource, Meta(description="Where the router's tokenizer comes from.")] = msgspec.field(
        default_factory=TokenizerSource
    )

    @property
    def requested_name(self) -> str:
        """The name under which clients ask for it."""
        return self.served_name or self.name
