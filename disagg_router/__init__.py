"""disagg-router: prefill/decode disaggregation for vLLM, decided per request."""

from importlib.metadata import version

__version__ = version("disagg-router")
