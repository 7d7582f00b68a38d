{{/* What the platform gives: platforms/NAME.yaml. */}}
{{- define "healthd.platform" -}}
{{- $known := .Files.Get (printf "platforms/%s.yaml" .Values.platform) -}}
{{- if not $known -}}
{{- fail "platform is not set: --set platform=eks-neuron, eks-gpu or cpu" -}}
{{- end -}}
{{- $known -}}
{{- end -}}

{{/* What the names of all objects begin with. */}}
{{- define "healthd.fullname" -}}
{{- default "healthd" .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "healthd.nodeName" -}}
{{ include "healthd.fullname" . }}-node{{ .Values.nameSuffix }}
{{- end -}}

{{- define "healthd.aggregatorName" -}}
{{ include "healthd.fullname" . }}-aggregator
{{- end -}}

{{- define "healthd.kueueName" -}}
{{ include "healthd.fullname" . }}-kueue
{{- end -}}

{{/* One more label to select by, where releases of other names may be in the same namespace. */}}
{{- define "healthd.instance" -}}
{{- if .Values.fullnameOverride -}}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- end -}}

{{/* The name of a service account: (list name-by-default values) */}}
{{- define "healthd.serviceAccount" -}}
{{- $account := index . 1 -}}
{{- default (ternary (index . 0) "default" $account.create) $account.name -}}
{{- end -}}

{{- define "healthd.labels" -}}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* An image: (list $ image) */}}
{{- define "healthd.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
image: {{ printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) | quote }}
{{- with $root.Values.images.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end -}}

{{- define "healthd.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "healthd.aggregatorHost" -}}
{{ include "healthd.aggregatorName" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* The headless Service that gives each aggregator a name, where there are several. */}}
{{- define "healthd.aggregatorPods" -}}
{{ include "healthd.aggregatorName" . }}-pods
{{- end -}}

{{- define "healthd.aggregatorPodsHost" -}}
{{ include "healthd.aggregatorPods" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* The Secret with the hashes of tokens, for who has no service account; empty for none. */}}
{{- define "healthd.tokens" -}}
{{- default (ternary "healthd-tokens" "" .Values.monitoring.enabled) .Values.secrets.tokens -}}
{{- end -}}

{{/* The variables of the node daemon. */}}
{{- define "healthd.nodeSettings" -}}
{{- $platform := include "healthd.platform" . | fromYaml -}}
HEALTHD_NODE_LISTEN: 0.0.0.0:8080
HEALTHD_NODE_SYNC_AGGREGATORS: {{ default (printf "https://%s:8090" (include "healthd.aggregatorHost" .)) .Values.node.aggregator | quote }}
HEALTHD_NODE_SYNC_TOKEN_FILE: /etc/healthd/token/token
HEALTHD_NODE_SYNC_CA_FILE: /etc/healthd/ca/ca.crt
HEALTHD_NODE_KUBERNETES_CONDITION: healthd.internal/Fit
HEALTHD_NODE_KUBERNETES_EVENTS: "true"
HEALTHD_PROBE_ACCELERATOR: {{ $platform.accelerator }}
{{- if eq .Values.profile "active" }}
# A container's own limits and names still say nothing of the node; the hook in the job's container judges those.
HEALTHD_NODE_DISABLED: host_name,mounts,process_limits
# Once after each boot, on free devices, so that a node without gates has a known health.
HEALTHD_NODE_ACTIVE_UNPROMPTED: boot
# Without its probes compiled a node would stay unknown; what has been compiled is kept on the host.
HEALTHD_PROBE_ON_COLD_CACHE: compile
{{- else }}
# Nothing runs on devices unless a gate or a person orders it: a pod may be given them at any moment.
HEALTHD_NODE_ACTIVE_UNPROMPTED: "off"
# What a container without rights sees of these is itself, not the node, or nothing (neuron_cores wants neuron-ls and
# its devices): better not looked at than passed wrongly or unknown for ever.
HEALTHD_NODE_DISABLED: device_permissions,device_holders,host_name,kernel_log,mounts,neuron_cores,process_limits,processes,shared_memory,matmul,memory,transfer,digest,train_step,data_parallel_step,checkpoint_store,checkpoint_load,data_store,all_reduce,all_gather,reduce_scatter,nccom_all_reduce,nccom_all_gather,nccom_reduce_scatter
{{- end }}
{{- if .Values.node.acceleratedHardwareReady }}
HEALTHD_NODE_KUBERNETES_ACCELERATED_HARDWARE_READY: "true"
{{- end }}
{{- end -}}

{{/* The variables of the aggregator. */}}
{{- define "healthd.aggregatorSettings" -}}
HEALTHD_AGGREGATOR_LISTEN: 0.0.0.0:8090
HEALTHD_AGGREGATOR_STATE_DIR: /var/lib/healthd
# Node daemons and hooks send the tokens of their service accounts, which are bound to this audience.
HEALTHD_AGGREGATOR_KUBERNETES_AUDIENCE: {{ .Values.callers.audience | quote }}
{{- $ours := printf "%s/%s-node*" .Release.Namespace (include "healthd.fullname" .) }}
{{- $node := include "healthd.serviceAccount" (list (include "healthd.nodeName" .) .Values.node.serviceAccount) }}
{{- $nodes := uniq (concat (list $ours) (ternary (list (printf "%s/%s" .Release.Namespace $node)) (list) (and .Values.node.enabled (not (empty .Values.node.serviceAccount.name)))) .Values.callers.nodes) }}
HEALTHD_AGGREGATOR_KUBERNETES_NODES: {{ join "," $nodes | quote }}
HEALTHD_AGGREGATOR_KUBERNETES_ADMINS: {{ join "," (concat (list (printf "%s/%s-admin" .Release.Namespace (include "healthd.fullname" .))) .Values.callers.admins) | quote }}
{{- if .Values.kueue.enabled }}
HEALTHD_AGGREGATOR_KUBERNETES_CONTROLLERS: {{ printf "%s/%s" .Release.Namespace (include "healthd.kueueName" .) | quote }}
{{- end }}
{{- with .Values.callers.hooks }}
HEALTHD_AGGREGATOR_KUBERNETES_HOOKS: {{ join "," . | quote }}
{{- end }}
{{- with .Values.callers.readers }}
HEALTHD_AGGREGATOR_KUBERNETES_READERS: {{ join "," . | quote }}
{{- end }}
{{- if include "healthd.tokens" . }}
HEALTHD_AGGREGATOR_TOKEN_TABLE: /etc/healthd/tokens/tokens.toml
{{- end }}
HEALTHD_AGGREGATOR_TLS_CERT: /etc/healthd/tls/tls.crt
HEALTHD_AGGREGATOR_TLS_KEY: /etc/healthd/tls/tls.key
{{- if .Values.aggregator.database.urlSecret.name }}
# What the aggregators know each other by.
HEALTHD_AGGREGATOR_CA_FILE: /etc/healthd/tls/ca.crt
{{- end }}
# A week of this first: every job is admitted, and the answer of enforce mode is recorded.
HEALTHD_POLICY_MODE: observe
{{- if .Values.actuator.enabled }}
HEALTHD_ACTUATOR_KIND: kubernetes
HEALTHD_ACTUATOR_MODE: observe
{{- with .Values.actuator.deviceTaints }}
HEALTHD_ACTUATOR_KUBERNETES_DEVICE_TAINTS: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Settings of the chart with the user's over them, as strings: (list chart's user's) */}}
{{- define "healthd.data" -}}
{{- $all := index . 0 -}}
{{- range $key, $value := index . 1 -}}
{{- $_ := set $all $key $value -}}
{{- end -}}
{{- range $key, $value := $all }}
{{ $key }}: {{ $value | quote }}
{{- end }}
{{- end -}}
