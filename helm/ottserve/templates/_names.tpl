{{- define "ottserve.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimAll "-" -}}
{{- end -}}

{{/* At most 40 characters: KubeRay appends up to 20 of its own. */}}
{{- define "ottserve.fullname" -}}
{{- $name := include "ottserve.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimAll "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimAll "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimAll "-" -}}
{{- end -}}
{{- end -}}

{{- define "ottserve.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "ottserve.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "ottserve.image" -}}
{{- printf "%s:%s" .Values.image.repository .Values.image.tag -}}
{{- end -}}

{{- define "ottserve.selector" -}}
app.kubernetes.io/name: {{ include "ottserve.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "ottserve.labels" -}}
{{ include "ottserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Where callers are answered: the gateway's pod, or in pod mode the only one. */}}
{{- define "ottserve.gatewayComponent" -}}
{{- ternary "gateway" "server" (eq .Values.mode "rayservice") -}}
{{- end -}}
