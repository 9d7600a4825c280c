"""The work folders of tasks are those of launchers."""

from launchers.workdir import root, work_folder

__all__ = ["root", "work_folder"]
