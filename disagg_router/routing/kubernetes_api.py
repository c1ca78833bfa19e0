"""The door to a Kubernetes API server: one list of objects, then what changes."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import httpx
import msgspec

from disagg_router.config import KubernetesConfig
from disagg_router.errors import ConfigError, DisaggError
from disagg_router.listening import bracketed

T = TypeVar("T")

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
GONE = 410  # the changes since the list are forgotten: list again

_CONNECT_LIMIT_S = 5.0
_LIST_LIMIT_S = 30.0
_WORDS_CHARS = 300


class ApiError(DisaggError):
    """The API server is away or refuses. `status` is its HTTP status; None when there was none."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Access:
    """`url` has no trailing slash. The files are read for every connection: kubelet replaces the token within the hour,
    and a cluster its certificates."""

    url: str
    namespace: str
    token_file: Path | None
    ca_file: Path | None


def find_access(
    settings: KubernetesConfig, environ: Mapping[str, str] = os.environ, account: Path = SERVICE_ACCOUNT
) -> Access:
    """What the settings say, and the pod's service account where they say nothing. Raises ConfigError.

    The account's token goes to no server that the settings name: it is meant for the cluster's own.
    """
    namespace = settings.namespace
    if namespace is None:
        try:
            namespace = (account / "namespace").read_text(encoding="utf-8").strip()
        except OSError as exc:
            raise ConfigError("fleet.kubernetes.namespace is missing, and this is no pod that has one: add it") from exc
    if settings.api is not None:
        files = [Path(name) if name else None for name in (settings.token_file, settings.ca_file)]
        return Access(settings.api, namespace, files[0], files[1])
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError("fleet.kubernetes.api is missing, and this is no pod of a cluster: name the API server's URL")
    return Access(f"https://{bracketed(host)}:{port}", namespace, account / "token", account / "ca.crt")


@dataclass(frozen=True, slots=True)
class Listed(Generic[T]):
    """All there is."""

    items: tuple[T, ...]


@dataclass(frozen=True, slots=True)
class Changed(Generic[T]):
    """One object as it is now, or as it was before it went (`gone`)."""

    item: T
    gone: bool


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """What to read: the API's path, the plural, and the type that one object is decoded to."""

    group: str
    plural: str
    type: type[T]


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: tuple[msgspec.Raw, ...] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    message: str = ""
    code: int | None = None


class KubernetesApi:
    """Reads one namespace."""

    def __init__(self, access: Access) -> None:
        self._access = access

    @property
    def namespace(self) -> str:
        return self._access.namespace

    async def list_then_watch(self, kind: Kind[T], selector: str) -> AsyncGenerator[Listed[T] | Changed[T], None]:
        """One Listed, then Changed ones until the server ends the watch.

        It takes no watch up again where it broke off: whoever wants to go on lists again, so that a change that was
        missed is not missed for ever. Raises ApiError.
        """
        path, query = f"{kind.group}/namespaces/{self.namespace}/{kind.plural}", {"labelSelector": selector}
        try:
            async with await self._connect() as http:
                # Without a resourceVersion the answer is the newest there is, not one from a cache.
                answer = await http.get(path, params=query)
                _check(answer, path)
                listed = msgspec.json.decode(answer.content, type=_List)
                yield Listed(tuple(msgspec.json.decode(item, type=kind.type) for item in listed.items or ()))
                since = {"watch": "true", "resourceVersion": listed.metadata.resource_version}
                # No limit on silence: the caller bounds the whole.
                limit = httpx.Timeout(_CONNECT_LIMIT_S, read=None)
                async with http.stream("GET", path, params=query | since, timeout=limit) as stream:
                    if not stream.is_success:
                        await stream.aread()
                        _check(stream, path)
                    async for line in stream.aiter_lines():
                        if (change := _change(line, kind.type, path)) is not None:
                            yield change
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            why = f"{type(exc).__name__}: {exc}"[:_WORDS_CHARS]
            raise ApiError(f"the API server at {self._access.url} does not answer ({why})") from exc
        except msgspec.MsgspecError as exc:
            raise ApiError(f"what {self._access.url} answers is not Kubernetes' API ({exc})") from exc

    async def _connect(self) -> httpx.AsyncClient:
        access = self._access
        limit = httpx.Timeout(_LIST_LIMIT_S, connect=_CONNECT_LIMIT_S)
        try:
            headers = await asyncio.to_thread(_bearer, access.token_file)
            verify: ssl.SSLContext | bool = False  # nothing to verify on plain HTTP
            if access.url.startswith("https:"):
                verify = await asyncio.to_thread(ssl.create_default_context, cafile=access.ca_file)
        except OSError as exc:  # an ssl.SSLError is one too
            raise ApiError(f"cannot use {exc.filename or access.ca_file}: {exc.strerror or exc}") from exc
        return httpx.AsyncClient(base_url=access.url, headers=headers, verify=verify, timeout=limit, trust_env=False)


def _bearer(file: Path | None) -> dict[str, str]:
    return {"authorization": f"Bearer {file.read_text(encoding='utf-8').strip()}"} if file else {}


def _check(answer: httpx.Response, path: str) -> None:
    if answer.is_success:
        return
    try:
        said = msgspec.json.decode(answer.content, type=_Status).message
    except msgspec.MsgspecError:
        said = ""
    raise _refused(path, answer.status_code, said)


def _refused(path: str, status: int | None, said: str) -> ApiError:
    hint = "; let the router's service account get, list and watch it" if status == httpx.codes.FORBIDDEN else ""
    return ApiError(f"the API server refuses {path}: {status} {said[:_WORDS_CHARS]}{hint}", status)


def _change(line: str, type_: type[T], path: str) -> Changed[T] | None:
    """None for what changes nothing."""
    if not line:
        return None
    event = msgspec.json.decode(line, type=_Event)
    if event.type == "ERROR":
        status = msgspec.json.decode(event.object, type=_Status)
        raise _refused(path, status.code, status.message)
    if event.type not in ("ADDED", "MODIFIED", "DELETED"):
        return None
    return Changed(msgspec.json.decode(event.object, type=type_), event.type == "DELETED")
