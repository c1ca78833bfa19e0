"""Dynamo's rule: the decode target prefills what is short, but only where its cache helps."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, PositiveInt, validate_call

from disagg_router.model import Decision, InferenceRequest, Reason
from disagg_router.policies.candidates import local, pick_decode, remote
from disagg_router.view import ClusterView


class IslBounding:
    """Local iff the uncached tokens on the chosen decode target are < `tokens` and their share of the prompt is
    < `share`. Both must hold, so a short cold prompt still goes remote (Dynamo 1.4, `--router-conditional-disagg`)."""

    needs_token_count = True
    soft_roles = False

    @validate_call(config=ConfigDict(strict=True))
    def __init__(self, tokens: PositiveInt = 2048, share: Annotated[float, Field(gt=0, le=1)] = 0.7) -> None:
        self._tokens, self._share = tokens, share

    def decide(self, request: InferenceRequest, view: ClusterView) -> Decision:
        if not request.splittable:
            return local(request, view, Reason.NOT_SPLITTABLE)
        if not request.prompt_tokens:
            return local(request, view, Reason.NOT_COUNTED)
        decode = pick_decode(request, view)
        uncached_tokens = request.uncached_tokens(decode.target)
        share = uncached_tokens / request.prompt_tokens
        terms = {"uncached_tokens": float(uncached_tokens), "uncached_share": share}
        if uncached_tokens < self._tokens and share < self._share:
            return local(request, view, Reason.CACHE_HOT, terms)
        return remote(request, view, Reason.LONG_PROMPT, terms, decode)
