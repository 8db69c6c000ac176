-- Publish one record of a replica or of a lane's offline worker, stamped with the server's time.
--
-- KEYS[1]  telemetry:{replica} or lane-telemetry:{lane}   string: JSON of the record (PX)
-- KEYS[2]  replica-index or lane-index                    zset: name -> server ms of its last record
-- ARGV[1]  JSON of the record without its last field "at_ms" and without the closing brace
-- ARGV[2]  life of the record in ms
-- ARGV[3]  name in the index
-- ARGV[4]  ms after which a silent name leaves the index
-- ARGV[5]  channel to nudge the policy worker on; '' for no nudge
--
-- Returns the stamp as a string of ms.
--@include typed
local wrong = wrong_type(KEYS[2], 'zset')
if wrong then
  return wrong
end
local now = redis.call('TIME')
local at = tonumber(now[1]) * 1000 + tonumber(now[2]) / 1000
local at_ms = string.format('%.3f', at)
redis.call('SET', KEYS[1], ARGV[1] .. ',"at_ms":' .. at_ms .. '}', 'PX', ARGV[2])
redis.call('ZADD', KEYS[2], at_ms, ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.3f', at - tonumber(ARGV[4])))
if ARGV[5] ~= '' then
  -- Users' jobs may not publish: their record is seen at the next cycle instead of at once.
  redis.pcall('PUBLISH', ARGV[5], ARGV[3])
end
return at_ms
