"""The front end's own settings: what the command line says and every API process needs to know."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rustvllm.config import METRICS_PREFIX, TracingConfig
from rustvllm.config.tracing import make_tracing_config
from rustvllm.server.flags.answer_args import DEFAULT_TOOL_CALL_CONSTRAINT
from rustvllm.server.flags.api_keys import api_keys
from rustvllm.server.flags.dashboard_args import DashboardAccess, dashboard_access
from rustvllm.server.flags.http_args import http_settings
from rustvllm.server.flags.http_settings import DEFAULT_KEEP_ALIVE_SECONDS, HttpSettings
from rustvllm.server.flags.log_args import RequestLogSettings, request_log_settings
from rustvllm.server.flags.serve_args import (
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_STALL_TIMEOUT,
    read_chat_template,
)

if TYPE_CHECKING:
    from rustvllm.server.schemas.protocol import GenerationRequest

SIGNAL_ECHO_SECONDS = 0.3
"""A launcher may pass on a signal that the terminal has sent as well: one within this time is not counted again."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP front end; times in seconds."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    key_weights: tuple[int, ...] = ()
    """Of :attr:`api_keys`, for the scheduling policy ``fair``; 1 of those beyond its end."""
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_docs: bool = True
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    root_path: str = ""
    lora_root: str | None = None
    lora_hub: tuple[str, ...] = ()
    uvicorn_log_level: str = "warning"
    enable_access_log: bool = False
    shutdown_timeout: float = 0.0
    stall_timeout: float = DEFAULT_STALL_TIMEOUT
    stall_action: str = "report"
    restart_engine: bool = False
    metrics_prefix: str = METRICS_PREFIX
    tracing: TracingConfig = field(default_factory=TracingConfig)
    dashboard: DashboardAccess = "local"
    http: HttpSettings = field(default_factory=HttpSettings)
    request_log: RequestLogSettings = field(default_factory=RequestLogSettings)
    response_role: str = "assistant"
    chat_template_content_format: str = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    return_tokens_as_token_ids: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    default_thinking_token_budget: int | None = None
    reasoning_end_text: str = ""
    reasoning_field: str = "both"
    tool_call_constraint: str = DEFAULT_TOOL_CALL_CONSTRAINT
    exclude_tools_when_tool_choice_none: bool = False
    sse_keep_alive_interval: float = DEFAULT_KEEP_ALIVE_SECONDS

    def complete(self, request: "GenerationRequest") -> None:
        """Give a request what this server has as the default of its fields."""
        if self.return_tokens_as_token_ids and request.return_tokens_as_token_ids is None:
            request.return_tokens_as_token_ids = True

    @property
    def has_dashboard(self) -> bool:
        """Whether the live page is on for clients of this machine."""
        return self.dashboard in ("local", "any")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "ServerSettings":
        """The settings of a command line.

        Raises:
            ConfigError: The chat template or the keys cannot be read, the endpoint for spans is not a URL, or flags
                do not go together.
        """
        keys = api_keys(args)
        return cls(
            api_keys=tuple(keys),
            key_weights=tuple(keys.values()),
            chat_template=read_chat_template(args.chat_template),
            trust_request_chat_template=args.trust_request_chat_template,
            enable_prompt_tokens_details=args.enable_prompt_tokens_details,
            enable_force_include_usage=args.enable_force_include_usage,
            enable_docs=not args.disable_fastapi_docs,
            max_body_bytes=args.max_body_bytes,
            root_path=args.root_path,
            lora_root=args.lora_root,
            lora_hub=tuple(args.lora_hub),
            uvicorn_log_level=args.uvicorn_log_level,
            enable_access_log=args.enable_access_log,
            shutdown_timeout=args.shutdown_timeout,
            stall_timeout=args.stall_timeout,
            stall_action=args.stall_action,
            restart_engine=args.restart_engine,
            metrics_prefix=args.metrics_prefix,
            tracing=make_tracing_config(
                getattr(args, "trace", None),
                getattr(args, "trace_file", None),
                getattr(args, "otlp_traces_endpoint", None),
            ),
            dashboard=dashboard_access(args),
            http=http_settings(args, args.disable_access_log_for_endpoints),
            request_log=request_log_settings(args),
            response_role=args.response_role,
            default_chat_template_kwargs=args.default_chat_template_kwargs,
            chat_template_content_format=args.chat_template_content_format,
            return_tokens_as_token_ids=args.return_tokens_as_token_ids,
            tool_call_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser,
            default_thinking_token_budget=args.default_thinking_token_budget,
            reasoning_end_text=args.reasoning_end_text,
            reasoning_field=args.reasoning_field,
            tool_call_constraint=args.tool_call_constraint,
            exclude_tools_when_tool_choice_none=args.exclude_tools_when_tool_choice_none,
            sse_keep_alive_interval=args.sse_keep_alive_interval,
        )
