-- Publish a new version of the pool's policy.
--
-- KEYS[1]  policy:current   string: JSON of the policy, with its version
-- KEYS[2]  policy:version   integer: number of the last version given out
-- KEYS[3]  policy:history   stream: one entry a version
-- ARGV[1]  JSON of the policy without its last field "version" and without the closing brace
-- ARGV[2]  who set it
-- ARGV[3]  a note ("rollback to 3")
-- ARGV[4]  number of versions that the history keeps
-- ARGV[5]  channel for changes
--
-- Returns the version.
local version = redis.call('INCR', KEYS[2])
local text = ARGV[1] .. ',"version":' .. version .. '}'
local now = redis.call('TIME')
local at_ms = string.format('%.3f', tonumber(now[1]) * 1000 + tonumber(now[2]) / 1000)
redis.call('SET', KEYS[1], text)
redis.call('XADD', KEYS[3], 'MAXLEN', ARGV[4], '*',
  'version', version, 'at_ms', at_ms, 'by', ARGV[2], 'note', ARGV[3], 'policy', text)
redis.call('PUBLISH', ARGV[5], version)
return version
