"""How an installation is configured: by environment variables that begin with MOK_ (docs/settings.md), and nothing else."""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from mok_service.errors import InvalidSpec
from mok_service.urls import BadUrl, normal_url

PREFIX: Final = "MOK_"
SECRET: Final = frozenset({"database_url", "data_urls", "data_s3_endpoint"})  # may hold a password: never shown
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Settings(BaseSettings):
    """One process's settings, read from its environment when it starts; keyword arguments win. Use `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True,
        use_attribute_docstrings=True, validate_default=True,
    )

    data_dir: Path = Path(".mok")
    """Folder of the embedded database, checkpoints, logs and server.json. Made absolute when the process starts."""
    database_url: str | None = Field(default=None, repr=False)
    """postgresql://user:password@host/name, or sqlite:////absolute/path; unset: an SQLite file in the data folder."""
    checkpoint_dir: Path | None = None
    """Folder of all runs' checkpoints; unset: checkpoints in the data folder. The API and every Ray node must see it."""
    ray_address: str | None = Field(default=None, min_length=1, max_length=255)
    """host:port of a Ray cluster that the scheduler joins; unset: it starts a Ray of its own."""
    ray_token: Path | None = None
    """File with the token of that Ray cluster; required with `ray_address`."""
    data_roots: Annotated[tuple[Path, ...], NoDecode] = ()
    """Folders whose files jobs may train on, separated as in PATH; unset: none."""
    data_urls: Annotated[tuple[str, ...], NoDecode] = ()
    """URL prefixes below which jobs may train on files, separated by commas; unset: on no remote data."""
    data_s3_endpoint: str | None = None
    """URL of the S3-compatible store that s3:// means; unset: Amazon's. It may have an inside address."""
    data_cache_dir: Path | None = None
    """Folder on each worker for files that were fetched; unset: cache in the data folder."""
    data_cache_gib_max: float = Field(default=64.0, ge=0.001, le=1_000_000.0)
    """Size of that folder in GiB; files that weren't used for longest are removed."""
    data_file_gib_max: float = Field(default=4.0, ge=0.001, le=1000.0)
    """Size of one file that is fetched, in GiB. Workers hold it in memory while they read it."""
    data_fetch_seconds_max: float = Field(default=3600.0, ge=1.0, le=86_400.0)
    """How long fetching one file may take, with all tries."""
    host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    """Address that the API listens on."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port that the API listens on; 0 chooses a free one."""
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Names, besides the loopback ones and `host`, that a request's Host header may have; separated by commas."""
    lease_seconds: float = Field(default=30.0, ge=1.0, le=3600.0)
    """How long a worker may hold a run without a sign of life."""
    heartbeat_seconds: float = Field(default=5.0, ge=0.05, le=600.0)
    """Time between a worker's signs of life; at most a third of the lease."""
    tick_seconds: float = Field(default=0.5, ge=0.01, le=60.0)
    """Time between two rounds of the scheduler."""
    retry_seconds: float = Field(default=1.0, ge=0.0, le=3600.0)
    """Wait before a crashed run's second attempt; it doubles with each further one, up to ten minutes."""
    start_seconds_max: float = Field(default=120.0, ge=1.0, le=3600.0)
    """How long a claimed run may take to start training."""
    stop_seconds_max: float = Field(default=60.0, ge=1.0, le=3600.0)
    """How long a run that is told to stop may go on; then its worker is ended."""
    shutdown_seconds_max: float = Field(default=10.0, ge=0.1, le=600.0)
    """How long the service waits for its parts when it stops; then it ends them."""
    actors_ready: int = Field(default=0, ge=0, le=1024)
    """Processes for attempts on CPUs that are ready on each node before they are needed."""
    actors_kept_max: int = Field(default=4, ge=0, le=1024)
    """Idle processes that are kept on each node for further attempts; 0: each attempt gets a new one."""
    actor_idle_seconds: float = Field(default=300.0, ge=0.0, le=86_400.0)
    """How long one of them is kept; `actors_ready` stay."""
    actor_runs_max: int = Field(default=100, ge=1, le=1_000_000)
    """Attempts that a process executes; then it's ended."""
    actor_gib_max: float = Field(default=1.0, ge=0.1, le=1024.0)
    """Resident memory in GiB that a process may keep after an attempt; one that has more is ended."""
    signing_key: Path | None = None
    """File of the key that signs attestations, mode 0600; unset: keys/signing.pem in the data folder. Made on first use."""
    event_seconds: float = Field(default=15.0, ge=0.1, le=300.0)
    """Time between two signs of life in an event stream with nothing to say."""
    event_streams_max: int = Field(default=1000, ge=1, le=100_000)
    """Event streams that one API process serves at a time."""
    event_streams_tenant_max: int = Field(default=600, ge=1, le=100_000)
    """Event streams of one tenant that one API process serves at a time."""
    require_keys: bool = False
    """Whether requests need an API key on loopback too. Elsewhere, and behind a trusted proxy, they always do."""
    trusted_proxies: Annotated[tuple[Network, ...], NoDecode] = ()
    """Networks of proxies whose X-Forwarded-For is believed, separated by commas."""
    requests_per_second: float = Field(default=50.0, ge=0.1, le=100_000.0)
    """Requests of one key that one API process answers in the long run."""
    requests_burst: int = Field(default=200, ge=1, le=1_000_000)
    """Requests of one key that it answers at once, after a pause."""
    failed_keys_per_minute: int = Field(default=20, ge=1, le=100_000)
    """Wrong keys from one address, after which requests with a key are refused for a while."""
    outbound_networks: Annotated[tuple[Network, ...], NoDecode] = ()
    """Networks, besides public ones, that the service may connect to for users, separated by commas."""
    webhook_hours_max: float = Field(default=24.0, ge=0.001, le=720.0)
    """How long a webhook's delivery is tried again before it's given up."""
    log_days: float = Field(default=0.0, ge=0.0, le=36_500.0)
    """After how many days the log lines of a run that has ended are removed; 0 keeps them."""
    log_lines_max: int = Field(default=100_000, ge=100, le=100_000_000)
    """Log lines that are kept of a run: the newest."""
    log_format: Literal["text", "json"] = "text"
    """How the service's own log is written."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource, dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keyword arguments, then the environment: no file is read."""
        return init_settings, env_settings

    @field_validator("data_roots", "data_urls", "allowed_hosts", "trusted_proxies", "outbound_networks", mode="before")
    @classmethod
    def _split(cls, value: Any, info: Any) -> Any:
        separator = os.pathsep if info.field_name == "data_roots" else ","
        return tuple(part.strip() for part in value.split(separator) if part.strip()) if isinstance(value, str) else value

    @field_validator("data_urls", "data_s3_endpoint")
    @classmethod
    def _normal_urls(cls, value: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        """Prefixes are compared with URLs in normal form. No message repeats a URL that may hold a secret."""
        try:
            if isinstance(value, tuple):
                return tuple(map(normal_url, value))
            if value is not None and (value := normal_url(value).rstrip("/")).startswith("s3:"):
                raise BadUrl("is no http:// or https:// URL")
        except BadUrl as bad:
            raise ValueError(f"URLs without user name, query and fragment; one {bad.problem}") from None
        return value

    @field_validator("data_dir", "data_roots", "data_cache_dir", "signing_key", "checkpoint_dir", "ray_token")
    @classmethod
    def _absolute(cls, value: Path | tuple[Path, ...] | None) -> Path | tuple[Path, ...] | None:
        """Paths keep their meaning when a process changes its working folder."""
        if value is None:
            return None
        return tuple(path.absolute() for path in value) if isinstance(value, tuple) else value.absolute()

    @model_validator(mode="after")
    def _signs_of_life(self) -> Self:
        if self.heartbeat_seconds * 3 > self.lease_seconds:
            raise ValueError(f"MOK_HEARTBEAT_SECONDS up to a third of MOK_LEASE_SECONDS; they are {self.heartbeat_seconds:g} and "
                             f"{self.lease_seconds:g}")
        return self

    @model_validator(mode="after")
    def _a_cluster_has_a_token(self) -> Self:
        if self.ray_address is not None and self.ray_token is None:
            raise ValueError("MOK_RAY_ADDRESS only with MOK_RAY_TOKEN, the file of the cluster's token")
        return self

    def database(self) -> str:
        """The database's URL: `database_url`, or the embedded one in the data folder."""
        return self.database_url or f"sqlite:///{self.database_file()}"

    def database_file(self) -> Path:
        """The file of the embedded database."""
        return self.data_dir / "mok.sqlite3"

    def checkpoints(self, run_id: str) -> Path:
        """The folder that holds a run's checkpoints."""
        return (self.checkpoint_dir or self.data_dir / "checkpoints") / run_id

    def data_cache(self) -> Path:
        """The folder of files that were fetched."""
        return self.data_cache_dir or self.data_dir / "cache"

    def key_file(self) -> Path:
        """The file of the signing key."""
        return self.signing_key or self.data_dir / "keys" / "signing.pem"

    def on_loopback(self) -> bool:
        """Whether only this machine reaches the API."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def hosts(self) -> tuple[str, ...]:
        """Every name, without a port, that a request's Host header may have."""
        return tuple(dict.fromkeys((*LOOPBACK_NAMES, self.host, *self.allowed_hosts)))


def load_settings(**given: Any) -> Settings:
    """The settings of this process, keyword arguments before its environment.

    Raises InvalidSpec naming each wrong variable, its value and what is allowed, and each variable that is nearly a setting.
    """
    errors = list(_misspelt())
    try:
        settings = Settings(**given)
    except ValidationError as error:
        errors.extend(_refused(error, given))
    if errors:
        raise InvalidSpec("the settings are invalid: " + "; ".join(map(_sentence, errors)), errors=errors)
    return settings


def _misspelt() -> Iterator[dict[str, Any]]:
    known = [PREFIX + name.upper() for name in Settings.model_fields]
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            for nearest in difflib.get_close_matches(name, known, n=1, cutoff=0.85):
                yield {"field": name, "value": None, "problem": f"is no setting, did you mean {nearest}?",
                       "allowed": "the variables of docs/settings.md", "nearest": nearest}


def _refused(error: ValidationError, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for item in error.errors(include_url=False, include_input=False):
        allowed = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if not item["loc"]:
            yield {"field": "", "value": None, "problem": "contradict each other", "allowed": allowed, "nearest": None}
            continue
        name = str(item["loc"][0])
        value = str(given.get(name, os.environ.get(PREFIX + name.upper())))
        yield {"field": PREFIX + name.upper(), "value": "(not shown)" if name in SECRET else value, "problem": "is refused",
               "allowed": allowed, "nearest": None}


def _sentence(error: dict[str, Any]) -> str:
    value = "" if error["value"] is None else f" = {error['value']}"
    return f"{error['field'] or 'they'}{value} {error['problem']} (allowed: {error['allowed']})"
