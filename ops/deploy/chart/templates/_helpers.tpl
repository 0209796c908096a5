{{- define "fairgate.name" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "fairgate" $name) }}{{ $name = printf "%s-fairgate" $name }}{{ end -}}
{{- trunc 40 $name | trimSuffix "-" -}}
{{- end }}

{{- /* What a selector has. Takes (list ROOT COMPONENT). */}}
{{- define "fairgate.selector" -}}
app.kubernetes.io/name: fairgate
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "fairgate.labels" -}}
{{ include "fairgate.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{- /* Takes (list ROOT NAME). */}}
{{- define "fairgate.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ index . 1 }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
{{- end }}

{{- /* Of every pod. Variables of Services would be FAIRGATE_PORT and the like: a start refuses them. */}}
{{- define "fairgate.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
imagePullSecrets: [{{ range .Values.image.pullSecrets }}{name: {{ . }}}, {{ end }}]
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* Of every container. */}}
{{- define "fairgate.container" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* A variable from a Secret. Takes (list VARIABLE REFERENCE). */}}
{{- define "fairgate.secret" -}}
- name: {{ index . 0 }}
  valueFrom: {secretKeyRef: {{ dict "name" (index . 1).name "key" (index . 1).key | toJson }}}
{{- end }}

{{- /* One pod at a time may be taken away. Takes (list ROOT COMPONENT NAME). */}}
{{- define "fairgate.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ index . 2 }}
  labels: {{- include "fairgate.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "fairgate.selector" . | nindent 6 }}
{{- end }}

{{- /* What gateways and engines mount alike. */}}
{{- define "fairgate.mounts" -}}
- {name: data, mountPath: /data}
- {name: tmp, mountPath: /tmp}
- {name: keys, mountPath: /etc/fairgate/keys, readOnly: true}
- {name: config, mountPath: /etc/fairgate/config, readOnly: true}
{{- if .Values.models.claim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- /* Takes (list ROOT FILE), the file of keys that the pod may have. */}}
{{- define "fairgate.volumes" -}}
{{- $root := index . 0 -}}
- name: tmp
  emptyDir: {}
- name: config
  configMap: {name: {{ include "fairgate.name" $root }}}
- name: keys
{{- if $root.Values.engines.replicas }}
  secret:
    secretName: {{ $root.Values.secrets.engineKeys }}
    defaultMode: 0440
    items: [{key: {{ index . 1 }}, path: {{ index . 1 }}}]
{{- else }}
  emptyDir: {}
{{- end }}
{{- with $root.Values.models.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end }}
