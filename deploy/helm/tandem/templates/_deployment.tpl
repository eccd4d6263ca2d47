{{/* The Deployment of a tier, and the parts of its pod. Takes (dict "root" $ "tier" "encoder"). */}}

{{- define "tandem.deployment" -}}
{{- $root := .root -}}
{{- $tier := .tier -}}
{{- $values := index $root.Values $tier -}}
{{- $gpu := $values.gpu | default dict -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "tandem.component" . }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "tandem.labels" . | nindent 4 }}
  annotations:
    checkov.io/skip1: CKV_K8S_43=a tag or a digest is the user's choice, for each tier
    checkov.io/skip2: CKV_K8S_15=images are tagged by version, so a node's copy is the right one
    checkov.io/skip3: CKV_K8S_35=the URL of the cache holds its password, and settings are read from the environment
    {{- if include "tandem.readsSlices" . }}
    checkov.io/skip4: CKV_K8S_38=this tier reads EndpointSlices with its service account
    {{- end }}
spec:
  {{- if not (include "tandem.isAutoscaled" .) }}
  replicas: {{ int $values.replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  progressDeadlineSeconds: {{ add (int $values.loadSeconds) 300 }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      {{- toYaml $values.strategy | nindent 6 }}
  selector:
    matchLabels:
      {{- include "tandem.selector" . | nindent 6 }}
  template:
    metadata:
      # No version here: a new chart alone restarts no pod.
      labels:
        {{- include "tandem.selector" . | nindent 8 }}
        {{- with $root.Values.commonLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with $values.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        kubectl.kubernetes.io/default-container: {{ $tier }}
        {{- with $values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ include "tandem.serviceAccountName" . }}
      automountServiceAccountToken: {{ include "tandem.readsSlices" . | eq "true" }}
      # Variables such as TANDEM_PORT that Kubernetes makes of Services would be read as settings.
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ include "tandem.graceSeconds" $values }}
      securityContext:
        {{- include "tandem.podSecurity" . | nindent 8 }}
      {{- with $root.Values.image.pullSecrets }}
      imagePullSecrets:
        {{- range . }}
        - name: {{ . }}
        {{- end }}
      {{- end }}
      {{- with $values.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- with $values.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- if eq $root.Values.model.source "hub" }}
      initContainers:
        {{- include "tandem.fetchContainer" . | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ $tier }}
          image: {{ include "tandem.image" . }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [tandem, {{ $tier }}]
          args:
            {{- include "tandem.args" . | nindent 12 }}
          env:
            {{- include "tandem.env" . | nindent 12 }}
          ports:
            {{- include "tandem.ports" . | nindent 12 }}
          {{- include "tandem.probes" . | nindent 10 }}
          {{- if $values.preStopSeconds }}
          lifecycle:
            preStop:
              {{- include "tandem.preStop" (dict "root" $root "seconds" (int $values.preStopSeconds)) | nindent 14 }}
          {{- end }}
          resources:
            {{- include "tandem.resources" . | nindent 12 }}
          securityContext:
            {{- include "tandem.containerSecurity" . | nindent 12 }}
          volumeMounts:
            {{- include "tandem.volumeMounts" . | nindent 12 }}
      volumes:
        {{- include "tandem.volumes" . | nindent 8 }}
      {{- if $values.topologySpread }}
      topologySpreadConstraints:
        {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
        - maxSkew: 1
          topologyKey: {{ . }}
          whenUnsatisfiable: ScheduleAnyway
          matchLabelKeys: [pod-template-hash]
          labelSelector:
            matchLabels:
              {{- include "tandem.selector" (dict "root" $root "tier" $tier) | nindent 14 }}
        {{- end }}
      {{- end }}
      {{- include "tandem.placement" $values | nindent 6 }}
{{- end -}}

{{- define "tandem.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tandem.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "tandem.ports" -}}
{{- $ports := dict "gateway" (dict "http" 8000) "encoder" (dict "http" 7100 "control" 7101 "data" 7102) "decoder" (dict "http" 7200 "control" 7201) -}}
{{- range $name, $port := index $ports .tier }}
- name: {{ $name }}
  containerPort: {{ $port }}
  protocol: TCP
{{- end }}
{{- end -}}

{{/* Alive is not ready: a pod that loads or drains answers /health. The startup probe lasts as long as a load may. */}}
{{- define "tandem.probes" -}}
{{- $values := index .root.Values .tier -}}
startupProbe:
  httpGet: {path: {{ eq .tier "gateway" | ternary "/health" "/ready" }}, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int $values.loadSeconds) 4) 5 }}
readinessProbe:
  httpGet: {path: /ready, port: http}
  {{- toYaml $values.readiness | nindent 2 }}
livenessProbe:
  httpGet: {path: /health, port: http}
  {{- toYaml $values.liveness | nindent 2 }}
{{- end -}}

{{- define "tandem.resources" -}}
{{- $values := index .root.Values .tier -}}
{{- $gpu := $values.gpu | default dict -}}
{{- $resources := deepCopy $values.resources -}}
{{- if int ($gpu.count | default 0) -}}
{{- $limits := merge (dict $gpu.resource (int $gpu.count)) ($resources.limits | default dict) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "tandem.env" -}}
{{- $values := index .root.Values .tier -}}
{{- $gpu := $values.gpu | default dict -}}
- name: HOME
  value: /tmp
{{- if eq .root.Values.model.source "hub" }}
- name: HF_HOME
  value: /models
# The init container has fetched everything: a start needs no hub.
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- if and (ne .tier "gateway") (eq (int ($gpu.count | default 0)) 0) }}
# Not the cores of the node: those of the pod.
- name: TANDEM_THREADS
  valueFrom:
    resourceFieldRef: {containerName: {{ .tier }}, resource: limits.cpu}
{{- end }}
{{- if eq .tier "encoder" }}
- name: TANDEM_PREPROCESS_THREADS
  valueFrom:
    resourceFieldRef: {containerName: {{ .tier }}, resource: limits.cpu}
{{- end }}
{{- include "tandem.redisEnv" .root }}
{{- with $values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.redisEnv" -}}
{{- if .Values.valkey.enabled }}
{{- $host := printf "%s.%s.svc:6379/0" (include "tandem.component" (dict "root" . "tier" "valkey")) .Release.Namespace }}
{{- if .Values.valkey.existingSecret }}
- name: VALKEY_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .Values.valkey.existingSecret }}, key: {{ .Values.valkey.passwordKey }}}
- name: TANDEM_REDIS
  value: redis://:$(VALKEY_PASSWORD)@{{ $host }}
{{- else }}
- name: TANDEM_REDIS
  value: redis://{{ $host }}
{{- end }}
{{- else if .Values.redis.existingSecret }}
- name: TANDEM_REDIS
  valueFrom:
    secretKeyRef: {name: {{ .Values.redis.existingSecret }}, key: {{ .Values.redis.urlKey }}}
{{- else if .Values.redis.url }}
- name: TANDEM_REDIS
  value: {{ .Values.redis.url | quote }}
{{- end }}
{{- end -}}

{{/* Downloads what this tier needs of a hub id, checks it, and ends. */}}
{{- define "tandem.fetchContainer" -}}
{{- $root := .root -}}
{{- $hub := $root.Values.model.hub -}}
- name: fetch-model
  image: {{ include "tandem.image" . }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [tandem, fetch]
  args:
    - --model
    - {{ $hub.id | quote }}
    {{- with $hub.revision }}
    - --revision
    - {{ . | quote }}
    {{- end }}
    - --role
    - {{ .tier }}
  env:
    - name: HOME
      value: /tmp
    - name: HF_HOME
      value: /models
    {{- with $hub.endpoint }}
    - name: HF_ENDPOINT
      value: {{ . | quote }}
    {{- end }}
    {{- with $hub.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ . }}, key: {{ $hub.tokenKey }}}
    {{- end }}
  resources:
    requests: {cpu: "1", memory: 1Gi, ephemeral-storage: 64Mi}
    limits: {cpu: "2", memory: 4Gi, ephemeral-storage: 1Gi}
  securityContext:
    {{- include "tandem.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "tandem.volumeMounts" -}}
{{- $values := index .root.Values .tier -}}
{{- if ne .root.Values.model.source "bundled" }}
- {name: models, mountPath: /models{{ if ne .root.Values.model.source "hub" }}, readOnly: true{{ end }}}
{{- end }}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.curve.existingSecret }}
- {name: curve, mountPath: /etc/tandem/curve, readOnly: true}
{{- end }}
{{- if and (eq .tier "gateway") .root.Values.gateway.apiKeys.existingSecret }}
- {name: api-keys, mountPath: /etc/tandem/api-keys, readOnly: true}
{{- end }}
{{- if $values.sharedMemory }}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}
{{- with $values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.volumes" -}}
{{- $values := index .root.Values .tier -}}
{{- if ne .root.Values.model.source "bundled" }}
- name: models
  {{- include "tandem.modelVolume" .root | nindent 2 }}
{{- end }}
- name: tmp
  emptyDir: {sizeLimit: 2Gi}
{{- with .root.Values.curve.existingSecret }}
- name: curve
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - {key: {{ $.root.Values.curve.key }}, path: {{ $.root.Values.curve.key }}}
{{- end }}
{{- if and (eq .tier "gateway") .root.Values.gateway.apiKeys.existingSecret }}
- name: api-keys
  secret: {secretName: {{ .root.Values.gateway.apiKeys.existingSecret }}, defaultMode: 0440}
{{- end }}
{{- with $values.sharedMemory }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- with $values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.modelVolume" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "pvc" -}}
persistentVolumeClaim: {claimName: {{ required "model.pvc.claimName is needed with model.source=pvc" $model.pvc.claimName }}, readOnly: true}
{{- else if eq $model.source "hostPath" -}}
hostPath: {path: {{ $model.hostPath.path }}, type: Directory}
{{- else if eq $model.source "image" -}}
{{- if semverCompare "<1.31.0-0" .Capabilities.KubeVersion.Version -}}
{{- fail (printf "model.source=image needs Kubernetes 1.31 or later, the cluster has %s: use pvc or hub" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
image:
  reference: {{ required "model.image.reference is needed with model.source=image" $model.image.reference | quote }}
  pullPolicy: {{ $model.image.pullPolicy }}
{{- else if $model.hub.existingClaim -}}
persistentVolumeClaim: {claimName: {{ $model.hub.existingClaim }}}
{{- else -}}
emptyDir: {sizeLimit: {{ $model.hub.cacheSize }}}
{{- end -}}
{{- end -}}
