"""`ebft-ds score`: rewards of the rows of a file, or of requests over HTTP, under a reward model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ebft_ds.cli.hardware import default_world_size, visible_devices
from ebft_ds.cli.train import rank_environment, under_launcher
from ebft_ds.errors import ConfigError, DataError
from ebft_ds.trainers.score_job import ScoreFile, ScoreJob, ScoreServer

FILE_OPTIONS, SERVER_OPTIONS = "Scores of a file", "Scores over HTTP"


def score(
    model: Annotated[str, typer.Option(help="Reward model: folder or hub name.", show_default=False)],
    source: Annotated[Path | None, typer.Option("--input", help="JSON lines to score.", rich_help_panel=FILE_OPTIONS)] = None,
    output: Annotated[Path | None, typer.Option(help="Scores, line for line; a stopped run goes on.", rich_help_panel=FILE_OPTIONS)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin again.", rich_help_panel=FILE_OPTIONS)] = False,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Write an error for a bad row, instead of ending.", rich_help_panel=FILE_OPTIONS)
    ] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Answer requests until Ctrl-C.", rich_help_panel=SERVER_OPTIONS)] = False,
    host: Annotated[str, typer.Option(help="Others than loopback need a key.", rich_help_panel=SERVER_OPTIONS)] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: a free one.", rich_help_panel=SERVER_OPTIONS)] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key of requests; or EBFT_SCORE_API_KEY.", rich_help_panel=SERVER_OPTIONS)
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Rows in one request, at most.", rich_help_panel=SERVER_OPTIONS)] = 1024,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="MiB of one request, at most.", rich_help_panel=SERVER_OPTIONS)] = 16.0,
    processes: Annotated[int | None, typer.Option(min=1, help="Ranks that share the model; default: one per GPU, or one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: bfloat16 on GPUs, float32 on the CPU.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows scored together by all ranks.")] = 128,
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens in one forward on one rank, at most.")] = 16384,
    normalize: Annotated[bool, typer.Option("--normalize", help="Also (score - mean) / std of the model's held-out rows.")] = False,
    max_length: Annotated[int | None, typer.Option(min=1, help="For models without reward_encoding.json.")] = None,
    deepspeed: Annotated[str | None, typer.Option(help="DeepSpeed JSON of the frozen engine.")] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run model code from the checkpoint.")] = False,
) -> None:
    """Score rows with a reward model: --input FILE --output FILE, or --serve.

    A row has messages, or a prompt (or none) with response, responses, or chosen and rejected.
    """
    if serve:
        if source is not None or output is not None:
            raise ConfigError("--serve answers requests; leave out --input and --output")
        work: ScoreFile | ScoreServer = ScoreServer(
            host=host, port=port, key_file=str(key_file.resolve()) if key_file else None, max_rows=max_rows, max_body_mb=max_body_mb
        )
    else:
        work = _file_work(source, output, overwrite, skip_bad_rows)
    devices = visible_devices()
    job = ScoreJob(
        work=work,
        model=str(Path(model).expanduser().resolve()) if Path(model).expanduser().is_dir() else model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        dtype=dtype or ("bfloat16" if devices else "float32"),
        max_length=max_length,
        token_budget=token_budget,
        batch=batch,
        normalize=normalize,
        deepspeed=deepspeed,
    )
    _quick_check(job)
    raise typer.Exit(_run(job, default_world_size(processes, len(devices)), on_cpu=not devices))


def _file_work(source: Path | None, output: Path | None, overwrite: bool, skip_bad_rows: bool) -> ScoreFile:
    if source is None or output is None:
        raise ConfigError("give --input FILE and --output FILE, or --serve")
    if not source.is_file():
        raise DataError(f"--input {source}: there is no such file")
    if output.is_dir() or not output.resolve().parent.is_dir():
        raise ConfigError(f"--output {output}: this must be a file in a folder that exists")
    if output.exists() and output.samefile(source):
        raise ConfigError(f"--output {output} is the input file; name another one")
    return ScoreFile(input=str(source), output=str(output), overwrite=overwrite, skip_bad_rows=skip_bad_rows)


def _quick_check(job: ScoreJob) -> None:
    """What can be checked without torch, before ranks are started."""
    from ebft_ds.config.model_facts import read_model_facts
    from ebft_ds.trainers.score_job import server_key

    job.recipe()
    read_model_facts(job.model)
    if isinstance(job.work, ScoreServer):
        server_key(job.work)


def _run(job: ScoreJob, world_size: int, *, on_cpu: bool) -> int:
    from ebft_ds.cli.supervisor import RankSupervisor

    text = msgspec.json.encode(job).decode()
    if under_launcher():
        from ebft_ds.cli.score_rank import main

        return main([text])
    # -P: a file called like a module in the working directory must not hide that module.
    command = [sys.executable, "-P", "-m", "ebft_ds.cli.score_rank", text]
    return RankSupervisor(command, world_size, environment=rank_environment(), on_cpu=on_cpu).run()
