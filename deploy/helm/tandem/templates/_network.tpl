{{/* Parts of NetworkPolicies. */}}

{{- define "tandem.peer" -}}
- podSelector:
    matchLabels:
      {{- include "tandem.selector" . | nindent 6 }}
{{- end -}}

{{- define "tandem.dnsEgress" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- end -}}

{{/* What every tier may reach: names and the cache. */}}
{{- define "tandem.commonEgress" -}}
{{ include "tandem.dnsEgress" . }}
{{- if .Values.valkey.enabled }}
- ports: [{port: 6379, protocol: TCP}]
  to:
    {{- include "tandem.peer" (dict "root" . "tier" "valkey") | nindent 4 }}
{{- else if include "tandem.hasCache" . }}
- ports: [{port: {{ include "tandem.redisPort" . }}, protocol: TCP}]
{{- end }}
{{- with .Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The hub, for the init container: a policy cannot tell the containers of a pod apart. A gateway's rule for media covers it. */}}
{{- define "tandem.hubEgress" -}}
{{- if eq .Values.model.source "hub" -}}
- ports: [{port: 443, protocol: TCP}]
  to:
    - ipBlock: {cidr: {{ ternary "0.0.0.0/0" "::/0" (eq .Values.ipFamily "IPv4") | quote }}}
{{- end }}
{{- end -}}

{{/* The port of redis.url; 6379 when it says none or lies in a secret (networkPolicy.extraEgress adds another). */}}
{{- define "tandem.redisPort" -}}
{{- regexFind ":[0-9]+(/|$)" (regexReplaceAll "^[a-z]+://" .Values.redis.url "") | trimPrefix ":" | trimSuffix "/" | default "6379" -}}
{{- end -}}

{{- define "tandem.apiPorts" -}}
- ports:
    {{- range .Values.networkPolicy.apiServerPorts }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  {{- with .Values.networkPolicy.apiServerCidrs }}
  to:
    {{- range . }}
    - ipBlock: {cidr: {{ . | quote }}}
    {{- end }}
  {{- end }}
{{- end -}}

{{- define "tandem.apiEgress" -}}
{{- if include "tandem.readsSlices" . -}}
{{ include "tandem.apiPorts" .root }}
{{- end -}}
{{- end -}}

{{- define "tandem.metricsIngress" -}}
- ports: [{port: {{ .port }}, protocol: TCP}]
  {{- with .root.Values.networkPolicy.metricsFrom }}
  from:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
