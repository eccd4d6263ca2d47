{{/* The disruption budget of a tier. Takes (dict "root" $ "tier" "encoder"). */}}

{{- define "tandem.availability" -}}
{{- $values := index .root.Values .tier -}}
{{- $most := ternary (int (index .root.Values.autoscaling .tier).max) (int $values.replicas) (eq (include "tandem.isAutoscaled" .) "true") -}}
{{- if and $values.pdb.enabled (gt $most 1) -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "tandem.component" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "tandem.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ $values.pdb.maxUnavailable }}
  # A pod that never became ready may always be moved.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "tandem.selector" . | nindent 6 }}
{{- end -}}
{{- end -}}
