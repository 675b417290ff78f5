{{/* Parts that every pod has, whatever it does. Each takes a dict: root, component and what else it names. */}}

{{/* Not empty in the pod that answers callers. */}}
{{- define "ottserve.isGateway" -}}
{{- if eq .component (include "ottserve.gatewayComponent" .root) -}}yes{{- end -}}
{{- end -}}

{{/* Only the head talks to the API server, and only where Ray's autoscaler runs beside it. */}}
{{- define "ottserve.needsToken" -}}
{{- and (eq .component "head") (ne (include "ottserve.autoscaled" .root) "") -}}
{{- end -}}

{{- define "ottserve.podMetadata" -}}
labels:
  {{- include "ottserve.selector" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/settings: {{ include "ottserve.settings" .root | sha256sum }}
  {{- if has .component (list "replica" "server") }}
  ottserve/memory-needed-bytes: {{ include "ottserve.memoryNeeded" .root | quote }}
  {{- end }}
  {{- with .root.Values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* placement: a values section with nodeSelector, tolerations and affinity. */}}
{{- define "ottserve.podSpec" -}}
serviceAccountName: {{ include "ottserve.serviceAccountName" .root | quote }}
automountServiceAccountToken: {{ include "ottserve.needsToken" . }}
# A Service called ottserve would put OTTSERVE_PORT and the like among the settings.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "ottserve.graceSeconds" .root }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .root.Values.runAsUser | int64 }}
  runAsGroup: {{ .root.Values.runAsUser | int64 }}
  fsGroup: {{ .root.Values.runAsUser | int64 }}
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .placement.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "ottserve.container" -}}
image: {{ include "ottserve.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- include "ottserve.containerSecurity" . | nindent 2 }}
env:
  {{- include "ottserve.env" .root | nindent 2 }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  - name: shared-memory
    mountPath: /dev/shm
  - name: settings
    mountPath: /etc/ottserve
    readOnly: true
  {{- if .root.Values.modelVolume.existingClaim }}
  - name: model
    mountPath: {{ .root.Values.modelVolume.mountPath }}
    readOnly: true
  {{- end }}
  {{- range .root.Values.secretMounts }}
  - name: secret-{{ .name }}
    mountPath: {{ .mountPath }}
    readOnly: true
  {{- end }}
  {{- if include "ottserve.isGateway" . }}
  {{- include "ottserve.gatewayMounts" .root | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "ottserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* What Serve must find in every process, then what the operator adds. */}}
{{- define "ottserve.env" -}}
- name: RAY_SERVE_USE_GRPC_BY_DEFAULT
  value: "1"
- name: RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP
  value: "0"
- name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD
  value: "0"
- name: RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH
  value: "67108864"
- name: RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S
  value: "1"
- name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS
  value: "1"
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "ottserve.volumes" -}}
- name: tmp
  emptyDir: {}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ include "ottserve.sharedMemory" .root }}
- name: settings
  configMap:
    name: {{ include "ottserve.fullname" .root | quote }}
{{- if .root.Values.modelVolume.existingClaim }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .root.Values.modelVolume.existingClaim | quote }}
    readOnly: true
{{- end }}
{{- range .root.Values.secretMounts }}
- name: secret-{{ .name }}
  secret:
    secretName: {{ .name | quote }}
{{- end }}
{{- if include "ottserve.isGateway" . }}
{{- include "ottserve.gatewayVolumes" .root }}
{{- end }}
{{- end -}}

{{/* Equal requests and limits. size: cpus, memory and perhaps gpus. */}}
{{- define "ottserve.resources" -}}
{{- $amounts := dict "cpu" (.size.cpus | int64 | toString) "memory" .size.memory -}}
{{- if gt (int .size.gpus) 0 -}}{{- $_ := set $amounts "nvidia.com/gpu" (.size.gpus | int64 | toString) -}}{{- end -}}
requests:
  {{- toYaml $amounts | nindent 2 }}
limits:
  {{- toYaml $amounts | nindent 2 }}
{{- end -}}
