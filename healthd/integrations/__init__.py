"""
Systems outside of healthd, one folder each: everything that only this system needs.

Nothing outside imports a leaf, and a leaf imports no other leaf. The core finds leaves by this list. Without its line
and its two folders (here and in `tests/integrations`) a leaf is gone, and everything else works.
"""

from healthd.core.integrations import CommandAt, Integration

INTEGRATIONS = (
    Integration(
        name="batch",
        actuator="healthd.integrations.batch.actuator:make",
        actuator_settings=("batch", "healthd.integrations.batch.settings:BatchActuatorSettings"),
        job_variables=("AWS_BATCH_JOB_ID",),
        launcher="healthd.integrations.batch.launcher:LAUNCHER",
    ),
    Integration(
        name="dra",
        device_actuator="healthd.integrations.dra.actuator:device_actuator",
        device_settings=("device_*", "healthd.integrations.dra.settings:DeviceTaintSettings"),
    ),
    Integration(
        name="ec2",
        aggregator_settings=("aws", "healthd.integrations.ec2.settings:AwsCallers"),
        identities="healthd.integrations.ec2.identities:provider",
        node_credential="healthd.integrations.ec2.credential:write_credential",
    ),
    Integration(
        name="ecs",
        allocation_settings=("ecs_*", "healthd.integrations.ecs.settings:EcsSettings"),
        job_scheduler="healthd.integrations.ecs.occupancy:SCHEDULER",
        job_variables=("ECS_CONTAINER_METADATA_URI", "ECS_CONTAINER_METADATA_URI_V4"),
    ),
    Integration(
        name="kubernetes",
        commands=(CommandAt(name="kubernetes", place="healthd.integrations.kubernetes.command:kubernetes"),),
        node_settings=("kubernetes", "healthd.integrations.kubernetes.settings:KubernetesSettings"),
        node_service="healthd.integrations.kubernetes.service:service",
        job_scheduler="healthd.integrations.kubernetes.kubelet:SCHEDULER",
        allocation_settings=("kubelet_*", "healthd.integrations.kubernetes.settings:KubeletSettings"),
        job_variables=("KUBERNETES_SERVICE_HOST",),
        workload_watch="healthd.integrations.kubernetes.pods:watch",
        launcher="healthd.integrations.kubernetes.launcher:LAUNCHER",
        aggregator_settings=("kubernetes", "healthd.integrations.kubernetes.settings:KubernetesCallers"),
        identities="healthd.integrations.kubernetes.service_accounts:provider",
        actuator="healthd.integrations.kubernetes.actuator:make",
        actuator_settings=("kubernetes", "healthd.integrations.kubernetes.settings:KubernetesActuatorSettings"),
    ),
    Integration(
        name="kueue",
        commands=(CommandAt(name="kueue", place="healthd.integrations.kueue.command:kueue"),),
        settings=("kueue", "healthd.integrations.kueue.settings:KueueSettings"),
    ),
    Integration(
        name="nvrx",
        node_settings=("nvrx", "healthd.integrations.nvrx.settings:NvrxSettings"),
        node_service="healthd.integrations.nvrx.hook:service",
    ),
    Integration(
        name="nvsentinel",
        node_settings=("nvsentinel", "healthd.integrations.nvsentinel.settings:NvsentinelSettings"),
        node_service="healthd.integrations.nvsentinel.events:service",
    ),
    Integration(
        name="openmpi",
        launcher="healthd.integrations.openmpi.launcher:LAUNCHER",
    ),
    Integration(
        name="sagemaker",
        job_variables=("TRAINING_JOB_NAME",),
        launcher="healthd.integrations.sagemaker.launcher:LAUNCHER",
    ),
    Integration(
        name="slurm",
        commands=(CommandAt(name="slurm", place="healthd.integrations.slurm.command:slurm", exit_codes=(2, 75, 75)),),
        actuator="healthd.integrations.slurm.actuator:make",
        hooked_job="healthd.integrations.slurm.jobs:hooked_job",
        job_scheduler="healthd.integrations.slurm.occupancy:SCHEDULER",
        job_variables=("SLURM_JOB_ID",),
        job_workload=("SLURM_JOB_ID", "slurm:"),
        launcher="healthd.integrations.slurm.launcher:LAUNCHER",
    ),
    Integration(
        name="steps",
        node_settings=("step_*", "healthd.integrations.steps.settings:StepSettings"),
        step_source="healthd.integrations.steps.reports:source",
        job_comparison="healthd.integrations.steps.fleet:JobComparison",
        check_params="healthd.integrations.steps.reports:check_params",
    ),
    Integration(
        name="torchrun",
        launcher="healthd.integrations.torchrun.launcher:LAUNCHER",
    ),
    Integration(
        name="webhook",
        aggregator_settings=("webhook_*", "healthd.integrations.webhook.settings:WebhookSettings"),
        job_events="healthd.integrations.webhook.events:sink",
    ),
)

__all__ = ["INTEGRATIONS"]
