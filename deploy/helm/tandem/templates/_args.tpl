{{/* The command line of each tier. A test holds every flag here against the settings in the code. */}}

{{/* One setting as arguments, a JSON list: booleans as --x or --no-x, lists repeated, maps as JSON. */}}
{{- define "tandem.setting" -}}
{{- $flag := printf "--%s" .key -}}
{{- if kindIs "bool" .value -}}
{{- list (ternary $flag (printf "--no-%s" .key) .value) | toJson -}}
{{- else if kindIs "slice" .value -}}
{{- $args := list -}}
{{- range .value }}{{ $args = concat $args (list $flag (toString .)) }}{{ end -}}
{{- $args | toJson -}}
{{- else if kindIs "map" .value -}}
{{- list $flag (toJson .value) | toJson -}}
{{- else if kindIs "float64" .value -}}
{{- list $flag (eq (floor .value) .value | ternary (printf "%.0f" .value) (toString .value)) | toJson -}}
{{- else if kindIs "invalid" .value -}}
[]
{{- else -}}
{{- list $flag (toString .value) | toJson -}}
{{- end -}}
{{- end -}}

{{- define "tandem.args" -}}
{{- $root := .root -}}
{{- $tier := .tier -}}
{{- $values := index $root.Values $tier -}}
{{- $any := include "tandem.anyAddress" $root -}}
{{- $zmq := include "tandem.zmqAddress" $root -}}
{{- $args := list "--model" (include "tandem.model" $root) "--served-model-name" (include "tandem.modelName" $root) -}}
{{- with $root.Values.model.hub.revision }}{{ if eq $root.Values.model.source "hub" }}{{ $args = concat $args (list "--revision" .) }}{{ end }}{{ end -}}
{{- $args = concat $args (list "--http-host" $any) -}}
{{- if eq $tier "gateway" -}}
{{- $args = concat $args (list "--port" "8000") -}}
{{- else if eq $tier "encoder" -}}
{{- $args = concat $args (list "--http-port" "7100" "--control-endpoint" (printf "%s:7101" $zmq) "--data-endpoint" (printf "%s:7102" $zmq)) -}}
{{- else -}}
{{- $args = concat $args (list "--http-port" "7200" "--control-endpoint" (printf "%s:7201" $zmq)) -}}
{{- end -}}
{{- $gpus := int (($values.gpu | default dict).count | default 0) -}}
{{- $used := int ($values.settings.tp | default 1) -}}
{{- if and (gt $gpus 0) (ne $gpus $used) -}}
{{- fail (printf "%s.gpu.count is %d, but a pod uses %d: an encoder one, a decoder as many as decoder.settings.tp says" $tier $gpus $used) -}}
{{- end -}}
{{- if ne $tier "encoder" -}}
{{- if $root.Values.encoder.enabled -}}
{{- $args = concat $args (list "--encoders" (include "tandem.members" (dict "root" $root "tier" "encoder"))) -}}
{{- end -}}
{{- range $root.Values.discovery.extraEncoders }}{{ $args = concat $args (list "--encoders" .) }}{{ end -}}
{{- end -}}
{{- if eq $tier "gateway" -}}
{{- if $root.Values.decoder.enabled -}}
{{- $args = concat $args (list "--decoders" (include "tandem.members" (dict "root" $root "tier" "decoder"))) -}}
{{- end -}}
{{- range $root.Values.discovery.extraDecoders }}{{ $args = concat $args (list "--decoders" .) }}{{ end -}}
{{- $args = concat $args (list "--gateways" (include "tandem.members" (dict "root" $root "tier" "gateway"))) -}}
{{- end -}}
{{- if and (eq $tier "gateway") $values.apiKeys.existingSecret -}}
{{- $args = concat $args (list "--api-key-file" (printf "/etc/tandem/api-keys/%s" $values.apiKeys.key)) -}}
{{- end -}}
{{- if include "tandem.readsSlices" . -}}
{{- $args = concat $args (list "--discovery-relist-s" (toString $root.Values.discovery.relistSeconds)) -}}
{{- end -}}
{{- if $root.Values.curve.existingSecret -}}
{{- $args = concat $args (list "--curve-key-file" (printf "/etc/tandem/curve/%s" $root.Values.curve.key)) -}}
{{- else if not $root.Values.curve.insecure -}}
{{- fail "set curve.existingSecret to a secret with the fleet's key, or curve.insecure=true where the pod network is trusted: see \"Keys\" in docs/kubernetes.md" -}}
{{- else if ne $tier "gateway" -}}
{{- $args = append $args "--allow-insecure-bind" -}}
{{- end -}}
{{- $args = concat $args (list "--drain-timeout-s" (toString $values.drainSeconds) "--log-level" $root.Values.logs.level "--log-format" $root.Values.logs.format) -}}
{{- range $key, $value := $values.settings -}}
{{- $args = concat $args (include "tandem.setting" (dict "key" $key "value" $value) | fromJsonArray) -}}
{{- end -}}
{{- toYaml $args -}}
{{- end -}}
