"""What we change in SGLang, through its own plugin entry point. Runs in every process of a server that we start.

`plugin_site/` holds the entry point's metadata; only our servers have it on their path, so no other SGLang is touched.
"""

import tempfile
from pathlib import Path

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils import is_cpu

from megatron_rl.rollout.receiver import in_a_session, report_instead_of_raising


def activate() -> None:
    """Register the hooks; SGLang applies them afterwards."""
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor",
        report_instead_of_raising,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_tensor",
        in_a_session,
        HookType.AROUND,
    )
    HookRegistry.register("sglang.srt.managers.load_snapshot.shm_path_for", _in_temporary_directory, HookType.REPLACE)
    if is_cpu():
        from megatron_rl.rollout.sglang_cpu.hooks import activate_cpu

        activate_cpu()


def _in_temporary_directory(ipc_name: str) -> str:
    """SGLang keeps this file of load figures in /dev/shm and leaves it behind; ours goes with the server's TMPDIR."""
    return str(Path(tempfile.gettempdir()) / f"sglang_loads_{Path(ipc_name).name}")
