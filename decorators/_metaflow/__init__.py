"""All uses of Metaflow's internals, in one place.

Written for Metaflow 2.19.39. Before a newer version is allowed, this package's tests must pass with it.
The internals used, and why no public interface is enough:

* ``metaflow.system_context.system_context.phase`` and the click context's ``saved_args``: which command
  this process runs. A mutator runs in every command and must plan in only some of them.
* ``FlowSpec._get_parameters``: the options of a flow's ``run``, for its help and for suggestions.
* ``metaflow._vendor.click.get_current_context``: the parsed flow parameters. A mutator receives the
  parameters' declarations, not the values of this run.
* ``TaskDataStoreSet``/``FlowDataStore``/``get_latest_run_id``: the parameters and the plan of the run that
  ``resume`` starts from; the ``resume`` command has no parameters.
* ``current._update_env``: publishes the profile as ``current.gpu_profile``, like Metaflow's own decorators.
* ``parameters.deploy_time_eval``: the defaults that a deployed flow will run with.
* ``MutableStep._my_step`` with ``.decorators``, ``.config_decorators``, and a decorator's ``attributes``,
  ``_user_defined_attributes``, ``statically_defined``: values that the user set explicitly, as opposed to
    defaults, and editing in place. ``add_decorator(..., OVERRIDE)`` would mark a decorator as inserted, and
    Metaflow would then not pass ``--with kubernetes:...`` on to the processes of the step.
* ``CardComponentManager._card_proc``, ``CardCreator._run_cards_subprocess``, ``CardDecorator.card_creator``,
  ``BlankCard``, ``update_card``, ``CardDatastore``: rendering a card in a separate process costs seconds of
  CPU time, delays the end of a step, and may never finish on a loaded machine. The card of a failed step must
  show its last state, too (Metaflow only finishes the card of a successful step).
* ``KubernetesJob.create_job_spec``, ``JobSetSpec.dump``, ``ArgoWorkflows._container_templates``: a pod's
  priority class, affinity and node name, for which ``@kubernetes`` has no arguments.
* ``ArgoWorkflows._compile_workflow_template``: finished workflows and their pods would never be deleted.
  ``ArgoClient``: scheduled workflows would overlap, and its requests have no time limit.
* ``Kubernetes.create_job_object``, ``Kubernetes.create_jobset``, ``ArgoWorkflows._base_kubernetes_labels``:
  user, flow and run as labels. Metaflow sets annotations, which cost tools do not group by.
* ``is_done`` of Kubernetes' ``RunningJob`` and ``RunningJobSet`` and of Batch's ``RunningJob``: Metaflow
  polls it every few seconds while it waits for a step, but neither shows why a job does not start nor gives
  up. ``_fetch_job``, ``_fetch_pod``, ``_fetch_jobset``: a short outage of the API server must not end the
  wait.
* The command lines of the processes that wait for remote jobs, ``kubernetes step`` and ``batch step``: a
  signal that ends only the launching process would leave their jobs running.
* ``Kubernetes.launch_job``, ``Kubernetes.wait``: Metaflow shows errors of the API server as tracebacks. The
  same two: a job that the cluster disrupted is submitted again without using up an attempt.
* ``FlowDataStore.get_task_datastore``, ``sync_local_metadata_from_datastore`` of the same processes: after a
  failed step that left no records, Metaflow's own error about them would be the last line.
* ``CatchDecorator`` under another name: ``@kubernetes`` rejects ``@catch`` together with ``@parallel`` by
  name.
* A compute decorator's ``runtime_step_cli``: the attempt after one that ran out of memory may need another
  machine, and Metaflow has no hook before a retry starts.
* ``unbounded_foreach.UBF_TASK``: identifies the command line of another node of a local run.
* ``METAFLOW_EXIT_DISALLOW_RETRY``, ``system_context.retry_count``: a user error must not be retried. The
  scheduler then ends with a line about the terminal step, so the status is used only if a retry would follow,
  and ``MetaflowInternalError.headline`` is reworded.
* ``system_context.max_user_code_retries`` and the ``@retry`` of the task's step: a deployed step has more
  attempts than its ``@retry``, for lost pods; a failing step ends after those that ``@retry`` allows.
* ``MetaflowCodeContentV1._module_files``: Metaflow also packs the ``.pyc`` files of installed packages.
  ``distribution_support._cached_distributions``: Metaflow reads the file lists of all distributions.
* The record behind a client's ``Run``, ``_object``: its last heartbeat shows whether the run was killed.
* ``metaflow.cli``'s ``print_metaflow_exception`` and ``start.main``: a user error before anything starts must
  exit with 2, while Metaflow always exits with 1; and the help must name the command that was typed.
* ``MetaflowExceptionWrapper``, ``print_metaflow_exception`` and ``traceback`` in the modules that format a
  failed step's exception: its text may contain a token, and is printed and stored.
* ``NativeRuntime._logger``: on a terminal, progress lines of training steps are updated in place; and the
  scheduler's last message is that a step failed, not why, so the task's error is kept and printed last.
* ``metaflow_config``: the default target of steps and its settings; for ``finetune doctor`` the datastore and
  the metadata provider.
* ``FlowDataStore._storage_impl``, ``plugins.DATASTORES``, ``datatools.s3.s3util.get_s3_client``: the run's
  datastore for files of any size. The public ``S3`` cannot delete and supports only S3.
* ``metaflow_config``'s settings of S3, and their copies in ``datatools.s3``: Metaflow retries failed S3
  requests for hours. Environment variables limit this in child processes, but this process has read them
  before it could set them.
"""

from decorators._metaflow.argo import compile_workflows
from decorators._metaflow.attempts import before_retry, catch_node_failure
from decorators._metaflow.cards import card, make_in_process, push_card, standalone_page
from decorators._metaflow.code_packages import exclude_bytecode
from decorators._metaflow.commands import (
    Backend,
    command,
    command_names,
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
    datastore_timeout_s,
    datastore_variables,
    give_up_datastore,
    limit_datastore,
    local_datastore,
    s3_client,
    storage,
)
from decorators._metaflow.endings import (
    FinetuneError,
    NotFit,
    TrainingFailed,
    after_error_message,
    main,
    print_line,
    user_errors,
    without_retry,
)
from decorators._metaflow.job_errors import explain_batch_errors, explain_kubernetes_errors
from decorators._metaflow.jobs import WaitedJob, on_batch_client, waited_attempt, waited_task, watch_waiting
from decorators._metaflow.labels import label_jobs
from decorators._metaflow.liveness import is_alive
from decorators._metaflow.masked_errors import mask_errors
from decorators._metaflow.pods import shape_pods
from decorators._metaflow.resubmitting import leave_no_record, submit_again
from decorators._metaflow.retries import limit_failures, retry_deployed
from decorators._metaflow.signals import forward_signals_to_jobs
from decorators._metaflow.step_functions import compile_state_machines
from decorators._metaflow.steps import StepView, UserValue, resumed_artifact, set_current
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
    "NotFit",
    "StepView",
    "TrainingFailed",
    "UserValue",
    "WaitedJob",
    "after_error_message",
    "before_retry",
    "card",
    "catch_node_failure",
    "command",
    "command_names",
    "compile_state_machines",
    "compile_workflows",
    "compiles_only",
    "configuration",
    "configured_storage",
    "configured_target",
    "datastore_timeout_s",
    "datastore_variables",
    "deployer",
    "ensure_python",
    "ensure_user",
    "exclude_bytecode",
    "explain_batch_errors",
    "explain_kubernetes_errors",
    "flow_name",
    "forward_signals_to_jobs",
    "give_up_datastore",
    "in_container",
    "is_alive",
    "label_jobs",
    "leave_no_record",
    "limit_datastore",
    "limit_failures",
    "local_datastore",
    "local_node_command",
    "main",
    "make_in_process",
    "mask_errors",
    "metadata_kind",
    "on_batch_client",
    "origin_run_id",
    "print_line",
    "push_card",
    "resumed_artifact",
    "retry_deployed",
    "run_id",
    "run_parameters",
    "s3_client",
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
    "without_retry",
]
