{{/* The settings as `ottserve serve` reads them: what pods and Secrets decide is filled in where nobody says it. */}}
{{- define "ottserve.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- $share := dict "num_cpus" .Values.replica.cpus "num_gpus" .Values.replica.gpus -}}
{{- $ranks := include "ottserve.ranks" . | int -}}
{{- if gt $ranks 1 -}}
{{- $share = dict "num_cpus" (divf .Values.replica.cpus $ranks) "num_gpus" (div .Values.replica.gpus $ranks) -}}
{{- end -}}
{{- $_ := set $settings "deployment" (merge $settings.deployment $share) -}}
{{- $_ := set $settings "gateway" (merge $settings.gateway (include "ottserve.secured" . | fromYaml)) -}}
{{- if eq .Values.mode "rayservice" -}}
{{- /* Replicas have a host each; the application is told their port, which settings of one host could not give. */ -}}
{{- $_ := set $settings.metrics "port" 0 -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}
