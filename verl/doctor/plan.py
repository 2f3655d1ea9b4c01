"""Which probes there are, in which processes they run and how long each may take."""

from __future__ import annotations

from collections.abc import Sequence

from verl.doctor.runner import Probe
from verl.requirements import Wanted, wanted_packages

SOFTWARE, DEVICES, MACHINE, TOGETHER, CONFIG, RUN = (
    "software",
    "devices",
    "machine",
    "several processes",
    "this config",
    "this run",
)
SECTIONS = (SOFTWARE, DEVICES, MACHINE, TOGETHER, CONFIG, RUN)
_OWN_PROBE = ("torch", "transformers")
_SLOW_TO_IMPORT = {"vllm": 180.0, "sglang": 180.0}


def probes_of_the_machine(folder: str, *, quick: bool = False) -> list[list[Probe]]:
    """Groups of probes; a group is one process. `folder`: where run folders go."""
    wanted = wanted_packages()
    core = [package for package in wanted if not package.extra]
    light = [_package(package, load=True) for package in core if package.name not in _OWN_PROBE]
    system = [
        Probe("python", "verl.doctor.software:python", SOFTWARE, when_broken="fatal"),
        *light,
        Probe("hugging face", "verl.doctor.hub:hub", SOFTWARE),
        Probe("gpu", "verl.doctor.devices:gpus", DEVICES, limit_s=90.0, advice="nvidia-smi hangs: reboot"),
        Probe("cpu cores", "verl.doctor.machine:cores", MACHINE),
        Probe("memory", "verl.doctor.machine:memory", MACHINE),
        Probe("shared memory", "verl.doctor.storage:shared_memory", MACHINE),
        Probe("limits", "verl.doctor.machine:limits", MACHINE),
        Probe(
            "hostname", "verl.doctor.machine:hostname", MACHINE, advice="mend /etc/hosts or the name server"
        ),
        Probe("clock", "verl.doctor.machine:clock", MACHINE, arguments={"folder": folder}),
        Probe("leftovers", "verl.doctor.storage:leftovers", MACHINE),
        Probe(
            "disk",
            "verl.doctor.storage:disk",
            MACHINE,
            limit_s=60.0,
            when_broken="fatal",
            advice="trainer.default_local_dir on another disk",
            arguments={"folder": folder},
        ),
        Probe("sandbox", "verl.doctor.machine:sandbox", MACHINE, limit_s=60.0),
    ]
    computing = [
        _core("torch", core, limit_s=120.0),
        # Before anything is calculated: its processes are forked, which threads and GPUs do not survive.
        Probe("gloo", "verl.doctor.together:gloo", TOGETHER, limit_s=60.0, needs="torch"),
        Probe(
            "torch and gpu",
            "verl.doctor.devices:driver_fits_torch",
            DEVICES,
            limit_s=90.0,
            needs="torch",
        ),
        Probe(
            "compute",
            "verl.doctor.devices:calculations",
            DEVICES,
            limit_s=120.0,
            when_broken="fatal",
            needs="torch",
        ),
        Probe("triton", "verl.doctor.devices:triton", DEVICES, limit_s=120.0, needs="torch"),
        Probe("nccl", "verl.doctor.together:nccl", TOGETHER, limit_s=60.0, needs="torch"),
        _core("transformers", core, limit_s=120.0, needs="torch"),
    ]
    if quick:
        computing = [probe for probe in computing if probe.section != TOGETHER]
    extras = [[_package(package, load=not quick)] for package in wanted if package.extra]
    ray = [Probe("ray cluster", "verl.doctor.together:ray_cluster", TOGETHER, limit_s=60.0)]
    return [system, computing, ray, *extras]


def _core(name: str, core: Sequence[Wanted], *, limit_s: float, needs: str = "") -> Probe:
    versions = next((package.versions for package in core if package.name == name), "")
    return Probe(
        name,
        f"verl.doctor.software:{name}",
        SOFTWARE,
        limit_s=limit_s,
        when_broken="fatal",
        advice=f"pip install --force-reinstall '{name}{versions}'",
        arguments={"versions": versions},
        needs=needs,
    )


def _package(package: Wanted, *, load: bool) -> Probe:
    return Probe(
        package.name,
        "verl.doctor.software:package",
        SOFTWARE,
        limit_s=_SLOW_TO_IMPORT.get(package.name, 60.0),
        when_broken="warning" if package.extra else "fatal",
        advice=f"pip install --force-reinstall '{package.requirement}'",
        arguments={
            "name": package.name,
            "versions": package.versions,
            "extra": package.extra,
            "load": load,
            "options": package.options,
        },
    )


def probes_of_a_config(arguments: list[str]) -> list[list[Probe]]:
    """For the command line of a training program."""
    # Looking must not download: what is not here is said to be missing.
    offline = {"HF_HUB_OFFLINE": "1"}

    def probe(name: str, limit_s: float, needs: str = "", **more: object) -> Probe:
        function = "data" if name.startswith("data.") else name
        return Probe(
            name,
            f"verl.doctor.config:{function}",
            CONFIG,
            limit_s=limit_s,
            when_broken="fatal",
            arguments={"arguments": arguments, **more},
            environment=offline,
            needs=needs,
        )

    files = [probe(key, 180.0, "config", key=key) for key in ("data.train_files", "data.val_files")]
    parts = [
        probe("config", 60.0),
        probe("model", 180.0, "config"),
        *files,
        probe("reward", 120.0, "config"),
    ]
    return [parts]


def probes_of_a_run(path: str) -> list[list[Probe]]:
    return [[Probe("run", "verl.doctor.run:run_folder", RUN, limit_s=60.0, arguments={"path": path})]]
