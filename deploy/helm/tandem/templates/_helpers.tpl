{{/* Names, labels and small decisions that several templates share. */}}

{{- define "tandem.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tandem.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "tandem.name" . -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of a component; they never change. Takes (dict "root" $ "tier" "encoder"). */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: {{ include "tandem.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .tier }}
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: tandem
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Name of a component's objects. */}}
{{- define "tandem.component" -}}
{{- printf "%s-%s" (include "tandem.fullname" .root) .tier -}}
{{- end -}}

{{/* Image of a tier. The autoscaler runs the gateway's. */}}
{{- define "tandem.image" -}}
{{- $image := (index .root.Values .tier).image -}}
{{- $repository := $image.repository -}}
{{- if and .root.Values.image.registry (ne .tier "valkey") -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .root.Values.image.registry) $repository -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository ($image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "tandem.serviceAccountName" -}}
{{- $account := (index .root.Values .tier).serviceAccount -}}
{{- $account.name | default (include "tandem.component" .) -}}
{{- end -}}

{{/* The folder of the checkpoint, or its hub id: what --model gets. */}}
{{- define "tandem.model" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "hub" -}}
{{- required "model.hub.id is needed with model.source=hub" $model.hub.id -}}
{{- else if eq $model.source "bundled" -}}
{{- $model.bundled.path -}}
{{- else if eq $model.source "hostPath" -}}
{{- if not $model.hostPath.path }}{{ fail "model.hostPath.path is needed with model.source=hostPath" }}{{ end -}}
/models
{{- else -}}
{{- printf "/models/%s" (trimPrefix "/" (index $model $model.source).path) | trimSuffix "/" -}}
{{- end -}}
{{- end -}}

{{- define "tandem.modelName" -}}
{{- $model := .Values.model -}}
{{- if $model.name -}}
{{- $model.name -}}
{{- else if eq $model.source "hub" -}}
{{- base $model.hub.id -}}
{{- else -}}
{{- base ((index $model $model.source).path | default "") | replace "." "" | replace "/" "" | required (printf "model.name is needed: model.%s.path does not end in a name" $model.source) -}}
{{- end -}}
{{- end -}}

{{/* Seconds between SIGTERM's preparation and SIGKILL: endpoints forget the pod, it drains, and 15 s to leave. */}}
{{- define "tandem.graceSeconds" -}}
{{- add (int .preStopSeconds) (int .drainSeconds) 15 -}}
{{- end -}}

{{/* Sleep before SIGTERM: the kubelet's own from Kubernetes 1.30, the image's before. */}}
{{- define "tandem.preStop" -}}
{{- if semverCompare ">=1.30.0-0" .root.Capabilities.KubeVersion.Version -}}
sleep:
  seconds: {{ .seconds }}
{{- else -}}
exec:
  command: ["sleep", {{ .seconds | quote }}]
{{- end -}}
{{- end -}}

{{/* "true" when an autoscaler owns the replicas of a tier. */}}
{{- define "tandem.isAutoscaled" -}}
{{- if and (ne .root.Values.autoscaling.mode "none") (index .root.Values.autoscaling .tier).enabled -}}true{{- end -}}
{{- end -}}

{{/* Refuses values that contradict each other, which no schema can tell. */}}
{{- define "tandem.checkValues" -}}
{{- range $tier, $bounds := pick .Values.autoscaling "gateway" "encoder" "decoder" -}}
{{- if gt (int $bounds.min) (int $bounds.max) -}}
{{- fail (printf "autoscaling.%s.min is %v, above autoscaling.%s.max, which is %v: set both" $tier $bounds.min $tier $bounds.max) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.valkey.enabled (or .Values.redis.url .Values.redis.existingSecret) -}}
{{- fail "redis names a server of your own, but valkey.enabled is true: set valkey.enabled=false" -}}
{{- end -}}
{{- end -}}

{{/* "true" when `tandem autoscaler` runs: to scale, or to mark pods for the autoscaler that does. */}}
{{- define "tandem.hasAutoscaler" -}}
{{- $auto := .Values.autoscaling -}}
{{- if or (eq $auto.mode "builtin") (and (ne $auto.mode "none") $auto.builtin.deletionCost) -}}true{{- end -}}
{{- end -}}

{{/* "true" when a tier reads EndpointSlices. */}}
{{- define "tandem.readsSlices" -}}
{{- if and (eq .root.Values.discovery.mode "kubernetes") (has .tier (list "gateway" "decoder")) -}}true{{- end -}}
{{- end -}}

{{/* "true" when there is a cache. */}}
{{- define "tandem.hasCache" -}}
{{- if or .Values.valkey.enabled .Values.redis.url .Values.redis.existingSecret -}}true{{- end -}}
{{- end -}}

{{- define "tandem.anyAddress" -}}
{{- ternary "0.0.0.0" "::" (eq .Values.ipFamily "IPv4") -}}
{{- end -}}

{{- define "tandem.zmqAddress" -}}
{{- ternary "tcp://0.0.0.0" "tcp://[::]" (eq .Values.ipFamily "IPv4") -}}
{{- end -}}

{{/* Where members of a tier are found, as --encoders, --decoders and --gateways take it. */}}
{{- define "tandem.members" -}}
{{- $component := include "tandem.component" . -}}
{{- if eq .root.Values.discovery.mode "kubernetes" -}}
{{- printf "kubernetes:%s%s" $component (eq .tier "gateway" | ternary "-peers" "") -}}
{{- else -}}
{{- $ports := dict "gateway" "8000" "encoder" "7101,7102" "decoder" "7201" -}}
{{- printf "dns:%s%s.%s.svc:%s" $component (eq .tier "gateway" | ternary "-peers" "") .root.Release.Namespace (index $ports .tier) -}}
{{- end -}}
{{- end -}}
