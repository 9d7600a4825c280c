"""Everything that this project needs of Metaflow's internals, in one place.

Read from and tried with Metaflow 2.19.39; a newer Metaflow needs this module's tests to pass first.
What is used, and why no public interface serves:

* ``metaflow.system_context.system_context.phase`` and the click context's ``saved_args``: which command
  this process runs. A mutator runs in all of them, and must plan in some and stay silent in the others.
* ``FlowSpec._get_parameters``: the options of a flow's ``run``, for its help and for suggestions.
* ``metaflow._vendor.click.get_current_context``: the parsed flow parameters. A mutator is given the
  parameters' declarations, not the values of this run.
* ``TaskDataStoreSet``/``FlowDataStore``/``get_latest_run_id``: the parameters and the plan of the run that
  ``resume`` starts from; its own command has none.
* ``current._update_env``: the profile as ``current.gpu_profile``, as Metaflow's own decorators do it.
* ``parameters.deploy_time_eval``: the defaults that a deployed flow will run with.
* ``MutableStep._my_step`` with ``.decorators``, ``.config_decorators``, and a decorator's ``attributes``,
  ``_user_defined_attributes``, ``statically_defined``: what the user gave explicitly, as against defaults;
  and editing in place. ``add_decorator(..., OVERRIDE)`` would mark a decorator as inserted, and Metaflow
  would then not hand a ``--with kubernetes:...`` on to the processes of the step.
* ``CardComponentManager._card_proc``, ``CardCreator._run_cards_subprocess``, ``CardDecorator.card_creator``,
  ``BlankCard``, ``update_card``, ``CardDatastore``: a page made by a process of its own costs seconds of a
  core, holds the end of a step up, and comes never on a loaded machine; and the last state of a failed step
  must reach its card, too (Metaflow finishes the card of a successful step only).
* ``KubernetesJob.create_job_spec``, ``JobSetSpec.dump``, ``ArgoWorkflows._container_templates``: a pod's
  priority class, its affinity and the name of its node, which ``@kubernetes`` has no argument for.
* ``ArgoWorkflows._compile_workflow_template``: finished workflows and their pods would stay for ever.
* ``Kubernetes.create_job_object``, ``Kubernetes.create_jobset``, ``ArgoWorkflows._base_kubernetes_labels``:
  user, flow and run as labels. Metaflow has them as annotations, by which cost tools don't group.
* ``is_done`` of Kubernetes' ``RunningJob`` and ``RunningJobSet`` and of Batch's ``RunningJob``: Metaflow asks
  for it every few seconds while it waits for a step, and shows neither why a job does not start nor ends it.
  ``_fetch_job``, ``_fetch_pod``, ``_fetch_jobset``: an API server that is gone for a while must not end it.
* The command lines of what waits for remote jobs, ``kubernetes step`` and ``batch step``: a signal
  that ends the launching process alone would leave their jobs behind.
* ``Kubernetes.launch_job``, ``Kubernetes.wait``: what the API server refuses is shown as a traceback.
* The same two: what a cluster has taken away is submitted again, without an attempt's being spent on it.
* ``CatchDecorator`` under another name: Kubernetes refuses ``@catch`` beside ``@parallel``, by its name.
* A compute decorator's ``runtime_step_cli``: an attempt after one that ran out of memory may need another
  machine, and Metaflow asks no one before it starts a retry.
* ``unbounded_foreach.UBF_TASK``: how the command line of another node of a local run is known.
* ``METAFLOW_EXIT_DISALLOW_RETRY``, ``system_context.retry_count``: a user's mistake is not worth a retry. The
  scheduler then ends with a line about the terminal step, so it is used only where a retry would follow, and
  ``MetaflowInternalError.headline`` is put into words that fit.
* ``MetaflowCodeContentV1._module_files``: of an installed package Metaflow packs the compiled files, too.
  ``distribution_support._cached_distributions``: it reads the file lists of all installed distributions.
* ``metaflow.cli``'s ``print_metaflow_exception`` and ``start.main``: a mistake is to end with 2 where nothing
  was started, while Metaflow ends with 1 whatever has happened; and help names the command that was typed.
* ``NativeRuntime._logger``: on a terminal, the lines of training steps are renewed in place.
* ``metaflow_config``: where steps run, and with what, where the user names nothing; for ``finetune doctor``
  which datastore and which metadata there are.
* ``FlowDataStore._storage_impl``, ``plugins.DATASTORES``, ``datatools.s3.s3util.get_s3_client``: the run's
  datastore for files of any size. The public ``S3`` has no way to remove anything, and knows S3 only.
* ``metaflow_config``'s settings of S3, and their copies in ``datatools.s3``: for hours Metaflow asks again
  what S3 doesn't answer. Its variables do in other processes; this one has read them before it can set them.
"""

from decorators._metaflow.argo import compile_workflows
from decorators._metaflow.attempts import before_retry, outlived
from decorators._metaflow.cards import card, make_in_process, push_card, standalone_page
from decorators._metaflow.code_packages import leave_bytecode_out
from decorators._metaflow.commands import (
    Backend,
    command,
    compiles_only,
    configured_target,
    deployer,
    in_container,
    local_node_command,
    metadata_kind,
    run_parameters,
    waits_for_other_nodes,
)
from decorators._metaflow.configuration import Configuration, configuration
from decorators._metaflow.datastores import (
    configured_storage,
    datastore_away_s,
    datastore_variables,
    give_datastore_up,
    limit_datastore,
    s3_client,
    storage,
)
from decorators._metaflow.endings import (
    FinetuneError,
    NotFit,
    TrainingFailed,
    after_last_words,
    final,
    main,
    say,
    user_errors,
)
from decorators._metaflow.job_errors import put_batch_in_words, put_in_words
from decorators._metaflow.jobs import (
    WaitedJob,
    on_batch_client,
    waited_attempt,
    waited_task,
    watch_waiting,
)
from decorators._metaflow.labels import label_jobs
from decorators._metaflow.pods import shape_pods
from decorators._metaflow.resubmitting import leave_no_record, submit_again
from decorators._metaflow.retries import retry_deployed
from decorators._metaflow.signals import end_with_jobs
from decorators._metaflow.step_functions import compile_state_machines
from decorators._metaflow.steps import Given, StepView, resumed_artifact, set_current
from decorators._metaflow.users import (
    ensure_python,
    ensure_user,
    flow_name,
    origin_run_id,
    run_id,
    shell_path,
)

__all__ = [
    "Backend",
    "Configuration",
    "FinetuneError",
    "Given",
    "NotFit",
    "StepView",
    "TrainingFailed",
    "WaitedJob",
    "after_last_words",
    "before_retry",
    "card",
    "command",
    "compile_state_machines",
    "compile_workflows",
    "compiles_only",
    "configuration",
    "configured_storage",
    "configured_target",
    "datastore_away_s",
    "datastore_variables",
    "deployer",
    "end_with_jobs",
    "ensure_python",
    "ensure_user",
    "final",
    "flow_name",
    "give_datastore_up",
    "in_container",
    "label_jobs",
    "leave_bytecode_out",
    "leave_no_record",
    "limit_datastore",
    "local_node_command",
    "main",
    "make_in_process",
    "metadata_kind",
    "on_batch_client",
    "origin_run_id",
    "outlived",
    "push_card",
    "put_batch_in_words",
    "put_in_words",
    "resumed_artifact",
    "retry_deployed",
    "run_id",
    "run_parameters",
    "s3_client",
    "say",
    "set_current",
    "shape_pods",
    "shell_path",
    "standalone_page",
    "storage",
    "submit_again",
    "user_errors",
    "waited_attempt",
    "waited_task",
    "waits_for_other_nodes",
    "watch_waiting",
]
