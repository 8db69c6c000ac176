-- Take a request from a worker that has not renewed it for a lease, and run it again or answer it.
--
-- An entry that accept.lua would not write is answered failed and dropped. Else, in this order: cancelled ->
-- answered cancelled; past its deadline -> expired; its client has seen tokens, or it was tried too often -> failed
-- (engine_lost); else it goes to the end of its queue as its next attempt.
--
-- KEYS 1 its hash   2 its stream   3 the first reply stream   4 replicas hash of its model   5 and more: its other
--   reply streams
-- ARGV 1 prefix   2 the owner as stale.lua listed it   3 entry id   4 lease, ms   5 most attempts
--      6 how long a result is kept, ms   7 life of the reply stream after this, ms   8 its MAXLEN
-- Returns requeued | cancelled | expired | failed | lost (no longer so: renewed, ended or reclaimed by
--   another) | the reply streams to use instead, apart by spaces, with "=" before them.
--@include clock
--@include entries
--@include replicas
--@include answer
--@include unreadable
--@include requeue

local keys = {req = KEYS[1], stream = KEYS[2], replies = {KEYS[3]}}
for i = 5, #KEYS do
  keys.replies[i - 3] = KEYS[i]
end
local entry, limits = ARGV[3], {keep_ms = ARGV[6], reply_ttl_ms = ARGV[7], maxlen = ARGV[8]}
if not held_by(keys.stream, entry, ARGV[2], tonumber(ARGV[4])) then
  return 'lost'
end
local found = redis.call('XRANGE', keys.stream, entry, entry)[1]
if not found then
  redis.call('XACK', keys.stream, GROUP, entry)
  return 'lost'
end
local flat = found[2]
local why = unreadable(fields_of(flat))
if why then
  drop_unreadable(keys, entry, flat, why, limits)
  return 'failed'
end
local elsewhere = moved(keys.req, keys.replies)
if elsewhere then
  return '=' .. elsewhere
end
local id, attempt = field(flat, 'id'), tonumber(field(flat, 'attempt'))
local now = clock_ms()
local word, result = ended(keys, flat, now, 'died')
if not word and attempt >= tonumber(ARGV[5]) then
  word = 'failed'
  result = failure('failed', 'engine_lost',
    'the request was given to ' .. attempt .. ' workers and each of them died or lost its lease', 502)
end
if word then
  answer(keys, entry, id, attempt, result, limits)
  return word
end
requeue(keys, entry, flat, attempt + 1)
wake(KEYS[4], ARGV[1], least_loaded(KEYS[4], now, nil))
return 'requeued'
