{{/* The name of a component's objects: `RELEASE-COMPONENT`. (dict "root" $ "name" "gateway") */}}
{{- define "pagewire.name" -}}
{{- $release := .root.Release.Name -}}
{{- printf "%s-%s" (ternary $release (printf "%s-pagewire" $release) (contains "pagewire" $release)) .name | trunc 52 -}}
{{- end -}}

{{- define "pagewire.selector" -}}
app.kubernetes.io/name: pagewire
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{- define "pagewire.metadata" -}}
name: {{ include "pagewire.name" . }}
labels:
  {{- include "pagewire.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- end -}}

{{- define "pagewire.image" -}}
{{- $v := .root.Values -}}
image: {{ printf "%s/%s:%s%s" $v.image.registry .name ($v.image.tag | default .root.Chart.AppVersion) (get (get $v .name) "imageSuffix" | default "") }}
imagePullPolicy: {{ $v.image.pullPolicy }}
{{- end -}}

{{/* .fixed: what holds the chart together, as arguments, which win over variables. */}}
{{- define "pagewire.args" -}}
{{- range $flag, $value := .fixed }}
- --{{ $flag }}={{ $value }}
{{- end -}}
{{- end -}}

{{/* Flags as variables, which overlays can patch by name: of all services, of the model, the service's own. */}}
{{- define "pagewire.env" -}}
{{- $model := ternary .root.Values.model.flags (dict) (has .name (list "tokenizer" "executor")) -}}
{{- range $flag, $value := mergeOverwrite (dict) .root.Values.flags $model (get .root.Values .name).flags }}
- {name: PAGEWIRE_{{ $flag | upper | replace "-" "_" }}, value: {{ kindIs "string" $value | ternary $value ($value | toJson) | quote }}}
{{- end }}
{{- if and .root.Values.apiKeysSecret (ne .name "executor") }}
- {name: PAGEWIRE_API_KEY_FILE, value: /etc/pagewire/keys/keys}
{{- end }}
{{- if .root.Values.tlsSecret }}
- {name: PAGEWIRE_SSL_CERTFILE, value: /etc/pagewire/tls/tls.crt}
- {name: PAGEWIRE_SSL_KEYFILE, value: /etc/pagewire/tls/tls.key}
- {name: PAGEWIRE_SSL_CA_CERTS, value: /etc/pagewire/tls/ca.crt}
{{- end }}
{{- with .root.Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "pagewire.hubEnv" -}}
{{- with .root.Values.model.hubTokenSecret }}
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}}
{{- end }}
{{- with .root.Values.model.endpoint }}
- {name: HF_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- end -}}

{{/* Ready to serve, and alive: what the service says of itself. Kubernetes' own gRPC probes do not speak TLS. */}}
{{- define "pagewire.probes" -}}
{{- $service := get (dict "tokenizer" "InferenceService" "scheduler" "SchedulerService" "executor" "ExecutorService") .name -}}
{{- $address := printf "localhost:%v" .port -}}
startupProbe:
  {{- include "pagewire.probe" (merge (dict "service" (printf "pagewire.v1.%s" $service) "path" "/readyz" "address" $address) .) | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ .starts }}
readinessProbe:
  {{- include "pagewire.probe" (merge (dict "service" (printf "pagewire.v1.%s" $service) "path" "/readyz" "address" $address) .) | nindent 2 }}
  periodSeconds: {{ ternary 10 2 (ne .root.Values.tlsSecret "") }}
  timeoutSeconds: 5
  failureThreshold: 1
livenessProbe:
  {{- include "pagewire.probe" (merge (dict "service" "" "path" "/livez" "address" $address) .) | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{- define "pagewire.probe" -}}
{{- if eq .name "gateway" -}}
httpGet: {path: {{ .path }}, port: {{ .port }}{{ if .root.Values.tlsSecret }}, scheme: HTTPS{{ end }}}
{{- else if .root.Values.tlsSecret -}}
exec: {command: [python, -m, pagewire.wire.health, {{ .address | quote }}{{ if .service }}, {{ .service }}{{ end }}]}
{{- else -}}
grpc: {port: {{ .port }}{{ if .service }}, service: {{ .service }}{{ end }}}
{{- end -}}
{{- end -}}

{{/* What pods of all services have in common. No service links: `PAGEWIRE_..._PORT` would be read as a flag. */}}
{{- define "pagewire.podSpec" -}}
serviceAccountName: {{ include "pagewire.name" . }}
automountServiceAccountToken: {{ eq .name "scheduler" }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .root.Values.terminationGracePeriodSeconds }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "pagewire.securityContext" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "pagewire.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "pagewire.selector" . | nindent 8 }}
{{- end -}}

{{- define "pagewire.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if has .name (list "tokenizer" "executor") }}
- {name: cache, mountPath: /var/cache/pagewire}
{{- if .root.Values.model.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}
{{- if and .root.Values.apiKeysSecret (ne .name "executor") }}
- {name: keys, mountPath: /etc/pagewire/keys, readOnly: true}
{{- end }}
{{- if .root.Values.tlsSecret }}
- {name: tls, mountPath: /etc/pagewire/tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "pagewire.volumes" -}}
- {name: tmp, emptyDir: {}}
{{- if has .name (list "tokenizer" "executor") }}
{{- if .root.Values.model.existingClaim }}
- {name: models, persistentVolumeClaim: {claimName: {{ .root.Values.model.existingClaim }}, readOnly: true}}
{{- end }}
{{- end }}
{{- if and .root.Values.apiKeysSecret (ne .name "executor") }}
- {name: keys, secret: {secretName: {{ .root.Values.apiKeysSecret }}}}
{{- end }}
{{- if .root.Values.tlsSecret }}
- {name: tls, secret: {secretName: {{ .root.Values.tlsSecret }}}}
{{- end }}
{{- end -}}

{{/* Fetches the model before the service starts, so that probes need not wait for it, and reads it into memory once. */}}
{{- define "pagewire.fetchModel" -}}
{{- if not .root.Values.model.existingClaim }}
initContainers:
  - name: model
    {{- include "pagewire.image" . | nindent 4 }}
    command: [python, -m, pagewire.cli]
    args:
      - model
      - pull
      - {{ .root.Values.model.name | quote }}
      {{- if eq .name "executor" }}
      - --warm
      {{- end }}
      {{- range $flag, $value := .root.Values.model.flags }}
      - --{{ $flag }}={{ $value }}
      {{- end }}
    {{- with include "pagewire.hubEnv" . }}
    env: {{- . | nindent 6 }}
    {{- end }}
    resources: {{- toYaml (get .root.Values .name).resources | nindent 6 }}
    {{- include "pagewire.securityContext" . | nindent 4 }}
    volumeMounts: {{- include "pagewire.mounts" . | nindent 6 }}
{{- end }}
{{- end -}}

{{- define "pagewire.container" -}}
{{- $env := include "pagewire.env" . -}}
name: {{ .name }}
{{ include "pagewire.image" . }}
args: {{- include "pagewire.args" . | nindent 2 }}
{{- with printf "%s%s%s" $env (ternary (include "pagewire.hubEnv" .) "" (has .name (list "tokenizer" "executor"))) (.env | default "") | trim }}
env:
  {{- . | nindent 2 }}
{{- end }}
resources: {{- toYaml (get .root.Values .name).resources | nindent 2 }}
{{ include "pagewire.securityContext" . }}
{{- end -}}
