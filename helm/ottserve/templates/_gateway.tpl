{{/* What the gateway's Secrets give its settings. Probes speak plain text, so beside TLS they need a port. */}}
{{- define "ottserve.secured" -}}
{{- $tls := dict -}}
{{- if .Values.gateway.tlsSecret -}}
{{- $tls = dict "certificate" "/etc/ottserve-tls/tls.crt" "key" "/etc/ottserve-tls/tls.key" -}}
{{- end -}}
{{- if include "ottserve.tls" . -}}{{- $_ := set $tls "health_port" 50052 -}}{{- end -}}
{{- with $tls }}
tls:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.gateway.tokensSecret }}
tokens_file: /etc/ottserve-tokens/tokens.yaml
{{- end }}
{{- end -}}

{{/* Not empty when calls are encrypted. */}}
{{- define "ottserve.tls" -}}
{{- .Values.gateway.tlsSecret | default (dig "tls" "certificate" "" .Values.settings.gateway) | default "" -}}
{{- end -}}

{{/* Where probes ask for health. */}}
{{- define "ottserve.healthPort" -}}
{{- $gateway := .Values.settings.gateway -}}
{{- if include "ottserve.tls" . -}}{{- dig "tls" "health_port" 50052 $gateway | default 50052 -}}{{- else -}}{{- $gateway.port -}}{{- end -}}
{{- end -}}

{{- define "ottserve.gatewayPorts" -}}
{{- $gateway := .Values.settings.gateway -}}
- {name: grpc, containerPort: {{ $gateway.port }}}
{{- with $gateway.http_port }}
- {name: http, containerPort: {{ . }}}
{{- end }}
- {name: metrics, containerPort: {{ $gateway.metrics.port }}}
{{- end -}}

{{/* The gateway's Secrets reach its own pod alone. */}}
{{- define "ottserve.gatewayMounts" -}}
{{- if .Values.gateway.tlsSecret }}
- name: tls
  mountPath: /etc/ottserve-tls
  readOnly: true
{{- end }}
{{- if .Values.gateway.tokensSecret }}
- name: tokens
  mountPath: /etc/ottserve-tokens
  readOnly: true
{{- end }}
{{- end -}}

{{- define "ottserve.gatewayVolumes" -}}
{{- with .Values.gateway.tlsSecret }}
- name: tls
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- with .Values.gateway.tokensSecret }}
- name: tokens
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- end -}}
