{{/* One group of Ray pods. Takes root, component, placement, size and what the group's container adds as `extra`. */}}
{{- define "ottserve.rayTemplate" -}}
metadata:
  {{- include "ottserve.podMetadata" . | nindent 2 }}
spec:
  {{- include "ottserve.podSpec" . | nindent 2 }}
  {{- with .placement.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  containers:
    - name: ray
      {{- include "ottserve.container" . | nindent 6 }}
      resources:
        {{- include "ottserve.resources" . | nindent 8 }}
      {{- include (printf "ottserve.%sContainer" .component) .root | nindent 6 }}
  volumes:
    {{- include "ottserve.volumes" . | nindent 4 }}
{{- end -}}

{{- define "ottserve.headContainer" -}}
ports:
  - {name: gcs, containerPort: 6379}
  - {name: dashboard, containerPort: 8265}
  - {name: client, containerPort: 10001}
readinessProbe:
  {{- include "ottserve.rayletProbe" . | nindent 2 }}
  periodSeconds: 5
livenessProbe:
  {{- include "ottserve.rayletProbe" . | nindent 2 }}
  initialDelaySeconds: 60
  periodSeconds: 10
  failureThreshold: 12
{{- end -}}

{{- define "ottserve.gatewayContainer" -}}
{{- $gateway := .Values.settings.gateway -}}
ports:
  {{- include "ottserve.gatewayPorts" . | nindent 2 }}
readinessProbe:
  grpc: {port: {{ include "ottserve.healthPort" . }}, service: ottserve.v1.GenerationService}
  periodSeconds: 2
  failureThreshold: 2
livenessProbe:
  {{- include "ottserve.rayletProbe" . | nindent 2 }}
  initialDelaySeconds: 60
  periodSeconds: 10
  failureThreshold: 12
lifecycle:
  {{- include "ottserve.drainHook" (dict "root" . "port" $gateway.metrics.port) | nindent 2 }}
{{- end -}}

{{- define "ottserve.replicaContainer" -}}
ports:
  - {name: replica-metrics, containerPort: {{ .Values.settings.metrics.port }}}
readinessProbe:
  {{- include "ottserve.rayletProbe" . | nindent 2 }}
  periodSeconds: 5
livenessProbe:
  {{- include "ottserve.rayletProbe" . | nindent 2 }}
  initialDelaySeconds: 60
  periodSeconds: 10
  failureThreshold: 12
lifecycle:
  {{- include "ottserve.drainHook" (dict "root" . "port" .Values.settings.metrics.port) | nindent 2 }}
{{- end -}}

{{/* Serve's proxies are off, so KubeRay's own probes of port 8000 would never be answered. */}}
{{- define "ottserve.rayletProbe" -}}
httpGet:
  path: /api/healthz
  port: 52365
timeoutSeconds: 5
{{- end -}}

{{/* Ray ends its actors without asking them; so what runs finishes before Ray hears of the end. */}}
{{- define "ottserve.drainHook" -}}
preStop:
  exec:
    command:
      - sh
      - -c
      - >-
        sleep {{ .root.Values.lifecycle.preStopSeconds | int64 }};
        ottserve wait-idle --timeout-s {{ include "ottserve.drainSeconds" .root }} --url http://127.0.0.1:{{ .port }}/metrics || true
{{- end -}}
