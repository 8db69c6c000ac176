-- Give back a claimed request that was not run (a worker that stops, an engine that failed before it sent
-- anything). The caller says whether the attempt counts. A cancelled or expired one is answered instead; one
-- whose client has seen tokens cannot be given back and fails.
--
-- KEYS 1 its hash   2 its stream   3 the reply stream that its entry names   4 replicas hash of its model
-- ARGV 1 prefix   2 consumer   3 entry id   4 replica that gives it back (it is not the one woken)
--      5 how long a result is kept, ms   6 life of the reply stream after this, ms   7 its MAXLEN
--      8 1: the attempt counts, 0: it does not
-- Returns released | cancelled | expired | failed | lost (not the caller's any more) | "=" and the reply
--   stream to use instead.
--@include clock
--@include entries
--@include replicas
--@include answer
--@include requeue

local keys = {req = KEYS[1], stream = KEYS[2], reply = KEYS[3]}
local entry, limits = ARGV[3], {keep_ms = ARGV[5], reply_ttl_ms = ARGV[6], maxlen = ARGV[7]}
if not held_by(keys.stream, entry, ARGV[2], 0) then
  return 'lost'
end
local elsewhere = moved(keys.req, keys.reply)
if elsewhere then
  return '=' .. elsewhere
end
local flat = redis.call('XRANGE', keys.stream, entry, entry)[1][2]
local id, attempt = field(flat, 'id'), tonumber(field(flat, 'attempt'))
local now = clock_ms()
local marks = redis.call('HMGET', keys.req, 'cancel', 'emitted')
local word, result
if marks[1] then
  word, result = 'cancelled', cancelled_result()
elseif tonumber(field(flat, 'deadline_ms')) <= now then
  word, result = 'expired', expired_result()
elseif marks[2] then
  word = 'failed'
  result = failure('failed', 'engine_lost',
    'the worker stopped after it had sent part of the answer; send the request again under a new id', 502)
end
if word then
  answer(keys, entry, id, attempt, result, limits)
  return word
end
requeue(keys, entry, flat, attempt + tonumber(ARGV[8]))
wake(KEYS[4], ARGV[1], least_loaded(KEYS[4], now, ARGV[4]))
return 'released'
