{{/* The most replicas where load decides how many there are; empty where their number is fixed. */}}
{{- define "ottserve.autoscaled" -}}
{{- dig "autoscale" "max_replicas" "" .Values.settings.deployment | default "" -}}
{{- end -}}

{{- define "ottserve.maxReplicas" -}}
{{- include "ottserve.autoscaled" . | default .Values.settings.deployment.num_replicas -}}
{{- end -}}

{{- define "ottserve.minReplicas" -}}
{{- $deployment := .Values.settings.deployment -}}
{{- if include "ottserve.autoscaled" . -}}{{- dig "autoscale" "min_replicas" 1 $deployment -}}
{{- else -}}{{- $deployment.num_replicas -}}{{- end -}}
{{- end -}}

{{/* Ray's autoscaler makes and ends pods, in a container beside the head. */}}
{{- define "ottserve.autoscaler" -}}
{{- if include "ottserve.autoscaled" . }}
enableInTreeAutoscaling: true
autoscalerOptions:
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  securityContext:
    {{- include "ottserve.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
  resources:
    requests: {cpu: 500m, memory: 512Mi}
    limits: {cpu: 500m, memory: 512Mi}
{{- end }}
{{- end -}}
