-- Cancel a request. One that waits is removed and answered; one that runs is marked, and its worker told to
-- abort it. A cancelled request is never run again.
--
-- KEYS 1 its hash   2 its stream   3 its reply stream (both as the hash names them)
-- ARGV 1 prefix   2 request id   3 how long a result is kept, ms   4 life of the reply stream, ms   5 its MAXLEN
-- Returns cancelled (it waited; answered now) | aborting (it runs; its worker was told) | done | unknown |
--   moved (the hash names other keys by now: read it again).
--@include entries
--@include answer

local keys = {req = KEYS[1], stream = KEYS[2], reply = KEYS[3]}
local known = redis.call('HMGET', keys.req, 'state', 'stream', 'reply', 'entry', 'attempt')
if not known[1] then
  return 'unknown'
end
if known[1] == 'done' then
  return 'done'
end
if known[2] ~= keys.stream or known[3] ~= keys.reply then
  return 'moved'
end
local held = redis.pcall('XPENDING', keys.stream, GROUP, known[4], known[4], 1)
if held.err or #held == 0 then
  answer(keys, known[4], ARGV[2], known[5] or '1', cancelled_result(),
    {keep_ms = ARGV[3], reply_ttl_ms = ARGV[4], maxlen = ARGV[5]})
  return 'cancelled'
end
redis.call('HSET', keys.req, 'cancel', 1)
redis.call('PUBLISH', ARGV[1] .. 'wake:' .. string.match(held[1][2], '^(.*):[^:]*$'), 'cancel ' .. ARGV[2])
return 'aborting'
