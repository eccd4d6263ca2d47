{{/* Up at once, as far as asked for; down one pod a minute, after a window in which fewer would have done. */}}
{{- define "tandem.scaleBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  selectPolicy: Max
  policies:
    - {type: Percent, value: 100, periodSeconds: 30}
    - {type: Pods, value: 4, periodSeconds: 30}
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.windowSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}
